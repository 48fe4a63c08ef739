//! Wake-ups, and what becomes of them when connections break.

use crate::{
    Holder,
    support::{
        Redis,
        proxy::{Flow, Proxy},
        until,
    },
    until_answered,
};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::task::JoinHandle;
use tower_herd::store::{FleetStore as _, HolderId, News};
use tower_herd_redis::{RedisConfig, RedisStore};

/// What was heard so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Heard(Arc<Mutex<Vec<Woken>>>);

type Woken = (String, Option<HolderId>);

impl Heard {
    pub(crate) fn listen(store: &RedisStore) -> (Self, JoinHandle<()>) {
        let (heard, store) = (Heard::default(), store.clone());
        let writes = heard.clone();
        let task = tokio::spawn(async move {
            store
                .listen(&|wake| writes.0.lock().unwrap().push((wake.provider.to_owned(), wake.holder)))
                .await;
        });
        (heard, task)
    }

    /// Everything since the last call.
    pub(crate) fn take(&self) -> Vec<Woken> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    /// Until this is heard; what was heard before is forgotten.
    pub(crate) async fn until(&self, provider: &str, holder: Option<HolderId>) {
        until("a wake-up", async || self.take().contains(&(provider.to_owned(), holder))).await;
    }
}

fn quick(url: &str) -> RedisStore {
    let config = RedisConfig::single(url).unwrap();
    let config =
        config.response_timeout(Duration::from_millis(500)).connect_timeout(Duration::from_millis(500));
    RedisStore::new(config.check_every(Duration::from_millis(100))).unwrap()
}

const CHANNEL: &str = "herd:v1:{llm}:w";

#[tokio::test]
async fn each_provider_that_was_exchanged_for_is_listened_for() {
    let redis = Redis::start().await;
    let store = crate::open(&redis.url());
    let (heard, task) = Heard::listen(&store);
    let mut holder = Holder::new(1);
    holder.exchange(&store, "llm").await.unwrap();
    // Subscribed, and told at once, since nobody knows what was missed: redisson/redisson#5762, #1763.
    heard.until("llm", None).await;
    holder.exchange(&store, "{other}").await.unwrap();
    heard.until("{other}", None).await;
    assert_eq!(redis.cli(&["PUBLISH", CHANNEL, &format!("{},{}", HolderId(1), HolderId(0xabc))]), "1");
    heard.until("llm", Some(HolderId(0xabc))).await;
    assert_eq!(redis.cli(&["PUBLISH", "herd:v1:{%7Bother%7D}:w", "*"]), "1");
    heard.until("{other}", None).await;
    // One of the script's own.
    holder.report.news =
        vec![News::Paused { scope: None, wait: 60_000, reason: tower_herd::PauseReason::Hint }];
    holder.exchange(&store, "llm").await.unwrap();
    heard.until("llm", None).await;
    // Whoever may publish there may publish anything.
    for message in ["", ",", ",,*,", "**", "zz", "-1", "\u{1f40e}", &"f".repeat(33), &"0,".repeat(10_000)] {
        assert_eq!(redis.cli(&["PUBLISH", CHANNEL, message]), "1", "{message}");
    }
    assert_eq!(redis.cli(&["PUBLISH", CHANNEL, &HolderId(5).to_string()]), "1");
    until("the last", async || heard.take().iter().any(|(_, holder)| *holder == Some(HolderId(5)))).await;
    task.abort();
    until("nobody listens any more", async || redis.cli(&["PUBLISH", CHANNEL, "*"]) == "0").await;
}

/// redisson/redisson#5762, #1763: what was published between the question and the subscription is not waited for.
#[tokio::test]
async fn redisson_5762_1763_who_subscribes_after_the_release_is_woken_all_the_same() {
    let redis = Redis::start().await;
    let store = quick(&redis.url());
    let mut holder = Holder::new(1);
    until_answered(&store, "llm", &mut holder).await;
    assert_eq!(redis.cli(&["PUBLISH", CHANNEL, &HolderId(1).to_string()]), "0", "nobody listens yet");
    let (heard, _task) = Heard::listen(&store);
    heard.until("llm", None).await;
    // Once for each subscription, and not at each check.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(heard.take(), []);
}

#[tokio::test]
async fn a_subscription_that_was_cut_comes_back_and_says_so() {
    let mut redis = Redis::start().await;
    let store = quick(&redis.url());
    let (heard, _task) = Heard::listen(&store);
    let mut holder = Holder::new(1);
    until_answered(&store, "llm", &mut holder).await;
    heard.until("llm", None).await;
    for _ in 0..5 {
        redis.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        heard.until("llm", None).await;
        assert_eq!(redis.cli(&["PUBLISH", CHANNEL, &HolderId(3).to_string()]), "1");
        heard.until("llm", Some(HolderId(3))).await;
    }
    redis.restart().await;
    heard.until("llm", None).await;
    assert_eq!(redis.cli(&["PUBLISH", CHANNEL, &HolderId(4).to_string()]), "1");
    heard.until("llm", Some(HolderId(4))).await;
}

/// Nothing is closed, and nothing comes: only the check can tell.
#[tokio::test]
async fn a_subscription_that_died_silently_is_replaced() {
    let redis = Redis::start().await;
    for flow in [Flow::Lose, Flow::Hold] {
        let proxy = Proxy::start(redis.port());
        let store = quick(&proxy.url());
        let (heard, task) = Heard::listen(&store);
        until_answered(&store, "llm", &mut Holder::new(1)).await;
        heard.until("llm", None).await;
        let connections = proxy.accepted();
        proxy.down(flow);
        until("another connection", async || proxy.accepted() > connections).await;
        proxy.heal();
        heard.until("llm", None).await;
        redis.cli(&["PUBLISH", CHANNEL, &HolderId(3).to_string()]);
        heard.until("llm", Some(HolderId(3))).await;
        task.abort();
    }
}

/// Wake-ups are a convenience: without the right to them the rest works, and the server is not pestered.
#[tokio::test]
async fn without_the_right_to_the_channels_there_is_polling() {
    let redis = Redis::start().await;
    assert_eq!(
        redis.cli(&["ACL", "SETUSER", "mute", "on", ">secret", "~herd:*", "+@all", "resetchannels"]),
        "OK"
    );
    let proxy = Proxy::start(redis.port());
    let config = crate::single(&proxy.url()).credentials(Some("mute"), "secret");
    let store = RedisStore::new(config.check_every(Duration::from_millis(100))).unwrap();
    let (heard, _task) = Heard::listen(&store);
    let mut holder = Holder::new(1);
    let news = News::Paused { scope: None, wait: 60_000, reason: tower_herd::PauseReason::Hint };
    holder.report.news = vec![news];
    for _ in 0..10 {
        holder.exchange(&store, "llm").await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(heard.take(), []);
    assert_eq!(proxy.accepted(), 2);
    let denied: u64 = redis.calls("subscribe");
    assert!(denied <= 10, "{denied}");
}

#[tokio::test]
async fn a_message_is_heard_once() {
    let redis = Redis::start().await;
    let store = quick(&redis.url());
    let (heard, _task) = Heard::listen(&store);
    until_answered(&store, "llm", &mut Holder::new(1)).await;
    heard.until("llm", None).await;
    for number in 1..=200_u128 {
        redis.cli(&["PUBLISH", CHANNEL, &HolderId(number).to_string()]);
    }
    let mut all = Vec::new();
    until("all of them", async || {
        all.extend(heard.take());
        all.len() >= 200
    })
    .await;
    let expected: Vec<_> = (1..=200).map(|number| ("llm".to_owned(), Some(HolderId(number)))).collect();
    assert_eq!(all, expected);
}
