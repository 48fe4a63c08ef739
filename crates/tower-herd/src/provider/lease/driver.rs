//! Who keeps the leases: one task a provider, on a thread of the fleet's own, so that a blocked runtime of the
//! application loses none (PrefectHQ/prefect#21925).

use super::{Core, Link, lock};
use crate::{
    Time,
    random::Seeds,
    store::{Epoch, FleetSettings, FleetStore, StoreError, StoreErrorKind, Wake},
};
use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, Weak, atomic::Ordering},
    thread,
    time::Duration,
};
use tokio::{runtime::Handle, sync::mpsc, task::JoinSet, time::Instant};

/// Where new providers go. The keeper ends when this, and all providers, are dropped.
pub(in crate::provider) struct Driver {
    join: mpsc::UnboundedSender<Member>,
}

struct Member {
    name: Arc<str>,
    core: Weak<Core>,
    link: Arc<Link>,
}

impl Drop for Member {
    /// However it ended: with the goodbye, or with its runtime, or by a panic of the store. Nobody waits for more.
    fn drop(&mut self) {
        self.link.has_left();
    }
}

/// What the wake-ups of the store find a provider by.
type Links = Mutex<HashMap<Arc<str>, Weak<Link>>>;

impl Driver {
    /// Starts to keep the leases of a fleet.
    pub(in crate::provider) fn start(
        store: Arc<dyn FleetStore>,
        settings: &FleetSettings,
        seeds: Seeds,
    ) -> io::Result<Self> {
        let (join, members) = mpsc::unbounded_channel();
        let run = run(store, settings.timeout(), members, seeds);
        if settings.has_own_thread() {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            thread::Builder::new().name("tower-herd lease".into()).spawn(move || runtime.block_on(run))?;
        } else {
            drop(Handle::try_current().map_err(io::Error::other)?.spawn(run));
        }
        Ok(Driver { join })
    }

    /// Keeps the lease of this provider, too, as long as it lives.
    pub(in crate::provider) fn keep(&self, core: &Arc<Core>) {
        if let Some(link) = core.link() {
            let member = Member { name: core.name.clone(), core: Arc::downgrade(core), link: link.clone() };
            // The keeper is gone only with its runtime, or if its thread has panicked: then leases run out, and the
            // policy holds.
            self.join.send(member).ok();
        }
    }
}

async fn run(
    store: Arc<dyn FleetStore>,
    timeout: Duration,
    mut members: mpsc::UnboundedReceiver<Member>,
    seeds: Seeds,
) {
    let links = Links::default();
    let wake = |wake: Wake<'_>| {
        let link = lock(&links).get(wake.provider).and_then(Weak::upgrade);
        if let Some(link) = link.filter(|link| wake.holder.is_none_or(|holder| link.is(holder))) {
            link.hurry();
        }
    };
    let mut tasks = JoinSet::new();
    {
        let mut listen = store.listen(&wake);
        let mut deaf = false;
        loop {
            tokio::select! {
                member = members.recv() => {
                    let Some(member) = member else { break };
                    lock(&links).insert(member.name.clone(), Arc::downgrade(&member.link));
                    tasks.spawn(keep(store.clone(), timeout, member, seeds.session().bits()));
                }
                // It is polled no more once it has ended: the fleet polls the store then.
                () = &mut listen, if !deaf => deaf = true,
            }
        }
    }
    while tasks.join_next().await.is_some() {}
}

/// What to do next.
enum Next {
    Wait(Duration),
    Send,
    Leave,
}

async fn keep(store: Arc<dyn FleetStore>, timeout: Duration, member: Member, seed: u64) {
    let Member { name, core, link } = &member;
    let seeds = Seeds::from_seed(seed);
    loop {
        let next = match core.upgrade() {
            Some(core) if !link.leaving.load(Ordering::Acquire) => core.next_step(link),
            _ => Next::Leave,
        };
        match next {
            Next::Wait(wait) => {
                tokio::select! {
                    () = tokio::time::sleep_until(Instant::now() + wait) => {}
                    () = link.bell.notified() => {}
                }
                continue;
            }
            Next::Leave => break,
            Next::Send => {}
        }
        let Some(report) = core.upgrade().map(|core| core.report(link, Epoch(seeds.session().bits()))) else {
            break;
        };
        let answer = tokio::time::timeout(timeout, store.exchange(name, &report)).await;
        let answer = answer.unwrap_or_else(|_| Err(StoreError::from(StoreErrorKind::Timeout)));
        let Some(core) = core.upgrade() else { break };
        match answer {
            Ok(grant) => core.granted(link, &grant),
            Err(error) => core.failed(link, &error),
        }
    }
    leave(&*store, timeout, &member, Epoch(seeds.session().bits())).await;
}

/// Says goodbye, so that its slots are free at once. Tried twice: they are free after a while anyway.
async fn leave(store: &dyn FleetStore, timeout: Duration, member: &Member, offer: Epoch) {
    let Member { name, core, link } = member;
    for _ in 0..2 {
        let mut report = match core.upgrade() {
            Some(core) => core.last_report(link, offer),
            None => lock(&link.lease).report(link.clock.now(), Default::default(), offer),
        };
        report.bye = true;
        let said = tokio::time::timeout(timeout, store.exchange(name, &report)).await;
        lock(&link.lease).failed(link.clock.now());
        if matches!(said, Ok(Ok(_))) {
            break;
        }
    }
}

impl Core {
    fn next_step(&self, link: &Link) -> Next {
        self.check_lease();
        // Before it is looked who waits: whoever comes after that rings, or is seen.
        let rung = link.rung.swap(false, Ordering::AcqRel);
        let load = self.load();
        let mut lease = lock(&link.lease);
        let now = link.clock.now();
        let due = lease.due(now, load).unwrap_or(now);
        let lapses = lease.use_by();
        drop(lease);
        if due <= now {
            return Next::Send;
        }
        if rung && load.busy.saturating_add(load.waiting) > load.cap {
            // It was heard that slots are lacking, and is known when they are asked for.
            link.rung.store(true, Ordering::Release);
        }
        let until = if lapses == Time::MAX { due } else { due.min(lapses) };
        Next::Wait(until.saturating_since(now).max(Duration::from_millis(1)))
    }
}
