//! Wake-ups.

use crate::{
    config::RedisConfig,
    key::{channel, key},
    link::{Purpose, entropy},
    nodes::{Nodes, Subscription},
};
use redis::{PushInfo, PushKind, Value};
use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};
use tower_herd::store::Wake;

/// After a failed round. The links themselves wait longer and longer between attempts.
const AGAIN: Duration = Duration::from_millis(200);

/// Runs for as long as it is polled.
///
/// Subscribing once more is harmless, so that is also how a subscription is checked: an answer says that it lives, in a
/// cluster a redirect says where it belongs now, and silence that the connection is dead.
pub(crate) async fn listen(
    config: &RedisConfig,
    mut providers: watch::Receiver<BTreeSet<String>>,
    wakes: &(dyn Fn(Wake<'_>) + Send + Sync),
) {
    let (sender, mut pushes) = mpsc::unbounded_channel();
    let nodes = match Nodes::new(config, Purpose::Wakes(sender)) {
        Ok(nodes) => nodes,
        Err(error) => {
            tracing::error!(error = %error, "no wake-ups from the fleet's store");
            return std::future::pending().await;
        }
    };
    let mut random = fastrand::Rng::with_seed(entropy());
    let mut heard = Heard { by_channel: HashMap::new(), denied: false };
    let mut next = Instant::now();
    loop {
        tokio::select! {
            biased;
            push = pushes.recv() => {
                // `nodes` holds a sender, so there is no end.
                let Some(push) = push else { return };
                match push.kind {
                    PushKind::Message | PushKind::SMessage => heard.wake(&push, wakes),
                    PushKind::Disconnection => next = Instant::now(),
                    // We never unsubscribe: a slot of the cluster has moved. The client may have taken this for the answer
                    // to something else, so the connection is not used again.
                    PushKind::SUnsubscribe => {
                        nodes.replace();
                        next = Instant::now();
                    }
                    _ => {}
                }
            }
            // The sender lives in the store that we borrow from.
            changed = providers.changed(), if providers.has_changed().is_ok() => {
                if changed.is_ok() {
                    next = Instant::now();
                }
            }
            () = sleep_until(next), if !providers.borrow().is_empty() => {
                let known: Vec<String> = providers.borrow_and_update().iter().cloned().collect();
                let well = heard.subscribe(config, &nodes, &known, wakes).await;
                let time = if well { config.check_every } else { AGAIN.min(config.check_every) };
                next = Instant::now() + time.saturating_mul(random.u32(90..=110)) / 100;
            }
        }
    }
}

struct Heard {
    /// The provider, and the connection on which it is subscribed to; 0: none.
    by_channel: HashMap<String, (String, u64)>,
    denied: bool,
}

impl Heard {
    /// Whether all is well, or cannot be better.
    async fn subscribe(
        &mut self,
        config: &RedisConfig,
        nodes: &Nodes,
        known: &[String],
        wakes: &(dyn Fn(Wake<'_>) + Send + Sync),
    ) -> bool {
        for provider in known {
            let key = key(&config.prefix, provider);
            let channel = channel(&key);
            let deadline = Instant::now() + config.connect_timeout.max(config.response_timeout);
            match nodes.ask(&key, deadline, &Subscription { channel: &channel }).await {
                Ok(((), id)) => {
                    let (_, on) = self.by_channel.entry(channel).or_insert_with(|| (provider.clone(), 0));
                    if *on != id {
                        *on = id;
                        // What was published before this is lost: a slot that became free between a report and the
                        // subscription would be waited for until the next poll.
                        wakes(Wake { provider, holder: None });
                    }
                }
                Err(error) if error.code() == Some("NOPERM") => {
                    if !std::mem::replace(&mut self.denied, true) {
                        tracing::warn!(
                            error = %error,
                            "the fleet's store does not let us listen for wake-ups (it needs the right to SUBSCRIBE, and to \
                             the channels): the fleet polls"
                        );
                    }
                }
                Err(error) => {
                    tracing::debug!(error = %error, "no wake-ups from the fleet's store for now");
                    return false;
                }
            }
        }
        true
    }

    fn wake(&self, push: &PushInfo, wakes: &(dyn Fn(Wake<'_>) + Send + Sync)) {
        let [channel, message] = push.data.as_slice() else { return };
        let (Value::BulkString(channel), Value::BulkString(message)) = (channel, message) else { return };
        let Ok(channel) = std::str::from_utf8(channel) else { return };
        let Some((provider, _)) = self.by_channel.get(channel) else { return };
        // Whoever may publish there may publish anything.
        let Ok(message) = std::str::from_utf8(message) else { return };
        if message == "*" {
            wakes(Wake { provider, holder: None });
            return;
        }
        for holder in message.split(',').filter_map(|holder| holder.parse().ok()) {
            wakes(Wake { provider, holder: Some(holder) });
        }
    }
}
