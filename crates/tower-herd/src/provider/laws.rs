//! Laws 1 and 2 over the whole provider: gate, control, pauses, sensor and queues together, under
//! random histories and a paused clock.

use super::{Admission, Provider, WaitFor, handover};
use crate::{Fleet, Kind, ProviderSettings, Pushback, Quota, Reach, Signal, Time, gate::Class};
use std::{cell::RefCell, collections::HashMap, future::poll_fn, rc::Rc, time::Duration};

const CALLERS: u64 = 24;
const CALLS: u64 = 12;
/// No pause of a history is longer than this, so that none is probed.
const LONGEST: u64 = 60_000;

/// What must hold, written down as the replies come.
#[derive(Default)]
struct Model {
    /// Until when nobody may call: the provider, and each scope.
    paused: HashMap<Option<u64>, Time>,
    admitted: u64,
}

impl Model {
    fn pause(&mut self, on: Option<u64>, until: Time) {
        let known = self.paused.entry(on).or_default();
        *known = until.max(*known);
    }

    fn open(&self, scope: Option<u64>, now: Time) -> bool {
        [None, scope].iter().all(|on| self.paused.get(on).is_none_or(|until| *until <= now))
    }
}

struct History {
    seed: u64,
    provider: Provider,
    floor: u32,
    max: Option<u32>,
    model: RefCell<Model>,
}

impl History {
    fn check(&self) {
        let (seed, provider) = (self.seed, &self.provider);
        let now = provider.clock().now();
        let ceiling = provider.ceiling();
        assert!(ceiling >= self.floor && self.max.is_none_or(|max| ceiling <= max), "seed {seed}: {ceiling}");
        // The two places that hold the provider's pause.
        let known = provider.core.root.paused(now).map(|(until, _)| until);
        let kept = provider.core.gate.look(|control, _| control.paused_until(now));
        assert_eq!(known, kept, "seed {seed}: they disagree");
        if let Some(told) = self.model.borrow().paused.get(&None).filter(|until| **until > now) {
            assert_eq!(known, Some(*told), "seed {seed}: not what was told");
        }
    }

    async fn caller(&self, nth: u64) {
        let mut random = fastrand::Rng::with_seed(self.seed << 8 | nth);
        for _ in 0..CALLS {
            tokio::time::sleep(Duration::from_millis(random.u64(..3000))).await;
            let scope = (random.u64(..4) == 0).then(|| random.u64(..3));
            let provider = match scope {
                Some(n) => self.provider.scope(&n.to_string()),
                None => self.provider.clone(),
            };
            self.call(&provider, scope, &mut random).await;
            if random.u64(..40) == 0 {
                self.provider.clear_pause();
                self.model.borrow_mut().paused.remove(&None);
                self.check();
            }
        }
    }

    async fn call(&self, provider: &Provider, scope: Option<u64>, random: &mut fastrand::Rng) {
        let core = provider.core.clone();
        let wait = WaitFor {
            agent: None,
            class: Class::Interactive,
            until: Time::MAX,
            deadline: true,
            end: Time::MAX,
            cut: Time::MAX,
            since: Time::ZERO,
        };
        let mut admission = Admission::begin(provider, wait, core.clock().now()).unwrap();
        let claim = poll_fn(|cx| admission.poll(cx));
        // Some give up while they wait.
        let patience = if random.u64(..6) == 0 { random.u64(..2000) } else { u64::MAX >> 30 };
        let Ok(slot) = tokio::time::timeout(Duration::from_millis(patience), claim).await else { return };
        let slot = slot.expect("nobody has a deadline");
        let now = core.clock().now();
        assert!(
            self.model.borrow().open(scope, now),
            "seed {}: {scope:?} early at {now:?}: {:?}, {provider:?}",
            self.seed,
            self.model.borrow().paused
        );
        assert!(core.gate.busy() <= core.gate.cap(), "seed {}: above the ceiling", self.seed);
        self.model.borrow_mut().admitted += 1;
        let admitting = handover::Admitting::new(&core, slot.admitted());
        let mut sensing = provider.begin(super::Caller::default());
        drop(admitting);
        let place = slot.sent();
        self.check();
        tokio::time::sleep(Duration::from_millis(1 + random.u64(..2000))).await;
        let now = core.clock().now();
        let hint = Duration::from_millis(random.u64(..LONGEST));
        let kind = match random.u64(..12) {
            0 => return,
            1 => Kind::Failed,
            2 => Kind::Overloaded,
            3 | 4 => Kind::Throttled,
            _ => Kind::Success,
        };
        let mut signal = Signal::new(kind);
        if random.u64(..3) == 0 {
            signal = signal.with_reach(Reach::Provider);
        }
        let on = scope.filter(|_| signal.reach == Reach::Scope);
        match kind {
            Kind::Overloaded | Kind::Throttled if random.bool() => {
                signal = signal.with_pushback(Pushback::After(hint));
                self.model.borrow_mut().pause(on, now.saturating_add(hint));
            }
            // At least a second; how long the provider knows.
            Kind::Throttled => self.model.borrow_mut().pause(on, now.saturating_add(Duration::from_secs(1))),
            Kind::Success if random.u64(..4) == 0 => {
                let limit = 1 + random.u32(..100);
                let remaining = random.u32(..=limit);
                let (reset, resolution) = (hint / 10, Duration::from_millis(1 << random.u64(..11)));
                signal = signal.with_quota(Some(Quota {
                    limit,
                    remaining,
                    reset,
                    resolution,
                    fixed_window: false,
                }));
            }
            _ => {}
        }
        sensing.outcome(&signal);
        if kind == Kind::Throttled && signal.pushback == Pushback::None {
            let known = match on {
                None => self.provider.core.root.paused(now).map(|(until, _)| until),
                Some(_) => provider.rest(now, Time::MAX, &mut None, std::task::Waker::noop()),
            };
            let mut model = self.model.borrow_mut();
            model.pause(on, known.unwrap_or(now));
            // Bare 429s in two scopes pause the provider too.
            if let Some((until, _)) = self.provider.core.root.paused(now) {
                model.pause(None, until);
            }
        }
        sensing.end(None);
        place.end();
        self.check();
    }
}

fn history(seed: u64) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let mut random = fastrand::Rng::with_seed(seed);
        let (floor, max) = (1 + random.u32(..3), random.bool().then(|| 3 + random.u32(..20)));
        let mut settings = ProviderSettings::new().floor(floor).start(3 + random.u32(..20));
        if let Some(max) = max {
            settings = settings.ceiling(max);
        }
        let provider = Fleet::local().seed(seed).configure("any", settings).unwrap();
        let history = Rc::new(History { seed, provider, floor, max, model: RefCell::default() });
        let callers = (0..CALLERS).map(|nth| {
            let history = history.clone();
            tokio::task::spawn_local(async move { history.caller(nth).await })
        });
        for caller in callers.collect::<Vec<_>>() {
            // Nobody is stranded: the pauses of all calls together end before this.
            let all = Duration::from_millis(CALLERS * CALLS * LONGEST);
            tokio::time::timeout(all, caller).await.unwrap_or_else(|_| panic!("seed {seed}: stuck")).unwrap();
        }
        let provider = &history.provider;
        tokio::time::sleep(Duration::from_secs(11)).await;
        assert_eq!(provider.waiting(), 0, "seed {seed}");
        // Slots of dropped calls have ended by now, as the next who looks will see.
        let now = provider.clock().now().saturating_add(Duration::from_secs(24 * 3600));
        if provider.core.gate.try_admit(now).is_ok() {
            provider.core.gate.release();
        }
        assert_eq!(provider.in_flight(), 0, "seed {seed}");
        assert!(history.model.borrow().admitted > CALLERS * CALLS / 2, "seed {seed}: hardly anybody called");
    });
}

#[test]
fn never_early_never_above_the_ceiling_nobody_stranded() {
    let long = std::env::var_os("TOWER_HERD_LONG").is_some();
    for seed in 0..if long { 5000 } else { 150 } {
        history(seed);
    }
}

/// Waiters in the queue are held by a pause that begins while they wait, and go when it is cleared.
#[tokio::test(start_paused = true)]
async fn a_pause_holds_who_waits_and_its_end_lets_them_go() {
    let settings = ProviderSettings::new().ceiling(1);
    let provider = Fleet::local().seed(1).configure("any", settings).unwrap();
    let held = provider.try_slot(|| None).unwrap_or_else(|_| panic!("free"));
    let wait = WaitFor {
        agent: None,
        class: Class::Interactive,
        until: Time::MAX,
        deadline: true,
        end: Time::MAX,
        cut: Time::MAX,
        since: Time::ZERO,
    };
    let waiter = tokio::spawn({
        let provider = provider.clone();
        async move {
            let mut admission = Admission::begin(&provider, wait, provider.clock().now()).unwrap();
            let slot = poll_fn(|cx| admission.poll(cx)).await;
            slot.map(|_| provider.clock().now()).unwrap()
        }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    provider.pause_for(Duration::from_secs(600));
    held.sent().end();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!waiter.is_finished(), "a free slot is no way round a pause");
    let cleared = provider.clock().now();
    provider.clear_pause();
    let went = waiter.await.unwrap();
    assert!(went >= cleared && went.saturating_since(cleared) < Duration::from_secs(2), "{went:?}");
}
