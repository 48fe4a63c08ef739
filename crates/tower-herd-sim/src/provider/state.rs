//! The state machine of a provider: pure and synchronous, fed with instants of its own time.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::quota::{Meter, Quota};
use super::recorder::{CallRecord, Outcome};
use super::script::{Fault, Script};

const LONG_PAUSE: Duration = Duration::from_secs(300);

/// What the provider decides when a call arrives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Decision {
    Unreachable,
    Unavailable,
    Throttle,
    /// The head comes after `head`, the call is over after `end`.
    Serve {
        head: Duration,
        end: Duration,
        fails: bool,
    },
}

/// The place of a call in service: its natural end and its record.
pub(crate) type Place = (Duration, usize);

#[derive(Clone, Copy, Debug)]
struct Told {
    from: Duration,
    until: Duration,
}

pub(crate) struct State {
    pub(crate) script: Script,
    pub(crate) meter: Meter,
    next_change: usize,
    rng: fastrand::Rng,
    /// Calls in service by natural end; the value says whether they will have failed.
    in_service: BTreeMap<Place, bool>,
    pub(crate) records: Vec<CallRecord>,
    /// Admissions and ends of served calls, for the plot of what is in flight.
    pub(crate) flights: Vec<(Duration, i32)>,
    pub(crate) in_flight_peak: usize,
    told: HashMap<u32, Told>,
    pauses: Vec<Told>,
}

impl State {
    pub(crate) fn new(script: Script) -> Self {
        Self {
            meter: Meter::new(script.quota, Duration::ZERO),
            next_change: 0,
            rng: fastrand::Rng::with_seed(script.seed),
            in_service: BTreeMap::new(),
            records: Vec::new(),
            flights: Vec::new(),
            in_flight_peak: 0,
            told: HashMap::new(),
            pauses: Vec::new(),
            script,
        }
    }

    /// Lets time pass: due quota changes happen and calls reach their natural end.
    pub(crate) fn advance(&mut self, now: Duration) {
        while let Some(&(at, quota)) = self.script.changes.get(self.next_change).filter(|(at, _)| *at <= now)
        {
            self.meter.set(at, quota);
            self.next_change += 1;
        }
        while let Some((&(end, id), &fails)) =
            self.in_service.first_key_value().filter(|((end, _), _)| *end <= now)
        {
            self.in_service.remove(&(end, id));
            self.flights.push((end, -1));
            self.settle(id, end, if fails { Outcome::Failed } else { Outcome::Served });
        }
    }

    fn settle(&mut self, id: usize, at: Duration, outcome: Outcome) {
        let record = &mut self.records[id];
        record.outcome = outcome;
        record.ended = Some(at);
    }

    pub(crate) fn quota(&self) -> Quota {
        self.meter.quota()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_service.len()
    }

    /// A call arrives. Returns its record and what happens to it.
    pub(crate) fn arrive(
        &mut self,
        now: Duration,
        task: Option<u64>,
        process: u32,
        cost: f64,
    ) -> (usize, Decision) {
        self.advance(now);
        let id = self.records.len();
        let paused =
            self.told.get(&process).filter(|t| now < t.until && t.from + self.script.told_grace <= now);
        let long = paused.is_some_and(|t| t.until.saturating_sub(t.from) > LONG_PAUSE);
        self.records.push(CallRecord {
            arrival: now,
            task,
            process,
            outcome: Outcome::Running,
            ended: None,
            early: paused.is_some() && !long,
            probe: long,
        });
        (id, self.decide(now, id, process, cost))
    }

    fn decide(&mut self, now: Duration, id: usize, process: u32, cost: f64) -> Decision {
        let mut failure = 0.0f64;
        let mut closed = false;
        let mut stray = 0.0f64;
        for fault in &self.script.faults {
            match *fault {
                Fault::Connect { from, to } if (from..to).contains(&now) => return Decision::Unreachable,
                Fault::Unavailable { from, to } if (from..to).contains(&now) => return Decision::Unavailable,
                Fault::Brownout { from, to, probability } if (from..to).contains(&now) => {
                    failure = failure.max(probability);
                }
                Fault::Stray { from, to, probability } if (from..to).contains(&now) => {
                    stray = stray.max(probability);
                }
                Fault::Closed { from, to } if (from..to).contains(&now) => closed = true,
                Fault::Refused { from, to, process: p } if p == process && (from..to).contains(&now) => {
                    closed = true;
                }
                _ => {}
            }
        }
        closed |= stray > 0.0 && self.rng.f64() < stray;
        if closed || self.script.enforced && !self.meter.fits(now, self.in_service.len(), cost) {
            return Decision::Throttle;
        }
        self.meter.charge(now, cost);
        let spread = self.script.spread;
        let factor = 1.0 - spread + 2.0 * spread * self.rng.f64();
        let head = crate::scale(self.script.latency, factor);
        let fails = failure > 0.0 && self.rng.f64() < failure;
        let mut end = if fails { head } else { head + self.script.body_time };
        if !self.script.lag.is_zero() {
            end += crate::scale(self.script.lag, 2.0 * self.rng.f64());
        }
        self.in_service.insert((now + end, id), fails);
        self.flights.push((now, 1));
        self.in_flight_peak = self.in_flight_peak.max(self.in_service.len());
        Decision::Serve { head, end, fails }
    }

    /// A refusal without service was delivered.
    pub(crate) fn delivered(&mut self, now: Duration, id: usize, outcome: Outcome) {
        self.advance(now);
        self.settle(id, now, outcome);
    }

    /// A refusal that told a wait was delivered to its process.
    pub(crate) fn tell(&mut self, now: Duration, id: usize, wait: Duration) {
        let until = now.saturating_add(wait);
        if wait.is_zero() {
            return;
        }
        self.pauses.push(Told { from: now, until });
        let told = self.told.entry(self.records[id].process).or_insert(Told { from: now, until });
        if told.until <= now {
            *told = Told { from: now, until };
        } else if until > told.until {
            told.until = until;
        }
    }

    /// A good reply was delivered: it ends a long pause that was told before the call was sent.
    pub(crate) fn succeeded(&mut self, id: usize) {
        let r = self.records[id];
        if let Some(t) = self.told.get(&r.process)
            && t.until.saturating_sub(t.from) > LONG_PAUSE
            && r.arrival >= t.from
        {
            self.told.remove(&r.process);
        }
    }

    /// The caller hung up. Returns without effect if the call was over anyway.
    pub(crate) fn hung_up(&mut self, now: Duration, id: usize, place: Option<Duration>) {
        self.advance(now);
        match place {
            Some(end) if self.script.aborts => {
                if self.in_service.remove(&(end, id)).is_some() {
                    self.flights.push((now, -1));
                    self.settle(id, now, Outcome::Aborted);
                }
            }
            Some(_) => {}
            None => self.settle(id, now, Outcome::Aborted),
        }
    }

    pub(crate) fn announced_until(&self) -> Option<Duration> {
        self.pauses.iter().map(|t| t.until).max()
    }

    /// When the first announced pause ended, whoever was told.
    pub(crate) fn first_pause_end(&self) -> Option<Duration> {
        self.pauses.iter().map(|t| t.until).min()
    }

    pub(crate) fn fault_until(&self, now: Duration) -> Option<Duration> {
        let end = |fault: &Fault| match *fault {
            Fault::Connect { from, to } | Fault::Unavailable { from, to } | Fault::Closed { from, to } => {
                (from..to).contains(&now).then_some(to)
            }
            // What fails for certain is down as well.
            Fault::Brownout { from, to, probability } if probability >= 1.0 => {
                (from..to).contains(&now).then_some(to)
            }
            Fault::Brownout { .. } | Fault::Stray { .. } | Fault::Refused { .. } => None,
        };
        self.script.faults.iter().filter_map(end).max()
    }

    /// The instants at which announced pauses ended, overlapping ones taken as one.
    pub(crate) fn pause_ends(&self) -> Vec<Duration> {
        let mut sorted = self.pauses.clone();
        sorted.sort_by_key(|t| t.from);
        let mut ends: Vec<Duration> = Vec::new();
        for t in sorted {
            match ends.last_mut() {
                Some(end) if t.from < *end => *end = (*end).max(t.until),
                _ => ends.push(t.until),
            }
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use super::super::quota::Rate;
    use super::*;
    use proptest::prelude::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn state(script: Script) -> State {
        State::new(script.spread(0.0).hint_seconds(1.0))
    }

    fn serve(s: &mut State, now: u64, task: u64) -> usize {
        let (id, d) = s.arrive(ms(now), Some(task), 0, 1.0);
        assert!(matches!(d, Decision::Serve { .. }), "{d:?} at {now}");
        id
    }

    proptest! {
        #[test]
        fn no_quota_is_ever_exceeded(
            gaps in proptest::collection::vec((0u64..400, 0u8..4), 1..200), ceiling in 1u32..6, aborts: bool,
        ) {
            let quota = Quota { concurrency: Some(ceiling), ..Quota::requests(Rate::per_second(4.0)) };
            let mut s = state(Script::new(quota).aborts(aborts));
            let (mut now, mut held, mut admitted) = (0, Vec::new(), Vec::new());
            for (gap, act) in gaps {
                now += gap;
                if act == 0 && let Some((id, end)) = held.pop() {
                    s.hung_up(ms(now), id, Some(end));
                } else if let (id, Decision::Serve { end, .. }) = s.arrive(ms(now), None, 0, 1.0) {
                    held.push((id, ms(now) + end));
                    admitted.push(ms(now));
                }
                prop_assert!(s.in_flight() <= ceiling as usize);
            }
            // A bucket of 4 that refills with 4 a second: at most 8 in any second.
            prop_assert!(super::super::peak(&admitted, ms(1000)) <= 8);
            s.advance(Duration::from_secs(3600));
            prop_assert_eq!(s.in_flight(), 0);
            prop_assert!(s.records.iter().all(|r| r.outcome != Outcome::Running || r.ended.is_none()));
            let level: i32 = s.flights.iter().map(|(_, by)| by).sum();
            prop_assert_eq!(level, 0);
        }
    }

    #[test]
    fn the_ceiling_holds_until_the_natural_end() {
        let mut s = state(Script::new(Quota::concurrency(2)));
        serve(&mut s, 0, 1);
        serve(&mut s, 10, 2);
        assert_eq!(s.arrive(ms(999), Some(3), 0, 1.0).1, Decision::Throttle);
        serve(&mut s, 1000, 3);
        assert_eq!(s.in_flight_peak, 2);
    }

    #[test]
    fn a_cut_spares_the_calls_in_flight() {
        let script = Script::new(Quota::concurrency(3)).change_at(ms(500), Quota::concurrency(1));
        let mut s = state(script);
        for t in 0..3 {
            serve(&mut s, t * 100, t);
        }
        assert_eq!(s.arrive(ms(1100), None, 0, 1.0).1, Decision::Throttle);
        serve(&mut s, 1200, 9);
        s.advance(ms(5000));
        assert_eq!(s.records.iter().filter(|r| r.outcome == Outcome::Served).count(), 4);
    }

    #[test]
    fn a_call_dropped_at_a_provider_that_does_not_abort_runs_on_and_counts() {
        for aborts in [false, true] {
            let mut s = state(Script::new(Quota::concurrency(1)).aborts(aborts));
            let id = serve(&mut s, 0, 1);
            s.hung_up(ms(100), id, Some(ms(1000)));
            let again = s.arrive(ms(200), Some(1), 0, 1.0).1;
            assert_eq!(matches!(again, Decision::Serve { .. }), aborts);
            s.advance(ms(2000));
            let outcome = if aborts { Outcome::Aborted } else { Outcome::Served };
            assert_eq!(s.records[id].outcome, outcome);
        }
    }

    #[test]
    fn stray_refusals_come_at_their_rate_and_cost_no_place() {
        let fault = Fault::Stray { from: ms(0), to: ms(1_000_000), probability: 0.25 };
        let mut s = state(Script::new(Quota::concurrency(1)).latency(ms(1)).seed(3).fault(fault));
        let refused =
            (0..1000).filter(|t| s.arrive(ms(t * 1000), None, 0, 1.0).1 == Decision::Throttle).count();
        assert!((200..300).contains(&refused), "{refused}");
        assert_eq!(s.arrive(ms(2_000_000), None, 0, 1.0).0, 1000);
        assert_eq!(s.in_flight(), 1);
    }

    #[test]
    fn early_means_told_and_still_running() {
        let mut s = state(Script::new(Quota::concurrency(0)));
        let (first, _) = s.arrive(ms(0), None, 0, 1.0);
        // The refusal of the first is still under way.
        assert!(!{
            let (i, _) = s.arrive(ms(3), None, 0, 1.0);
            s.records[i].early
        });
        s.delivered(ms(5), first, Outcome::Throttled);
        s.tell(ms(5), first, ms(1000));
        for (now, process, early) in [(6, 0, true), (6, 1, false), (1004, 0, true), (1005, 0, false)] {
            let (i, _) = s.arrive(ms(now), None, process, 1.0);
            assert_eq!(s.records[i].early, early, "{now} {process}");
        }
    }

    #[test]
    fn pauses_merge_by_maximum() {
        let mut s = state(Script::new(Quota::concurrency(0)));
        for (now, wait) in [(0, 1000), (100, 5000), (200, 300), (9000, 1000)] {
            let (id, _) = s.arrive(ms(now), None, 0, 1.0);
            s.tell(ms(now), id, ms(wait));
        }
        assert_eq!(s.pause_ends(), [ms(5100), ms(10_000)]);
        assert_eq!(s.records.iter().filter(|r| r.early).count(), 2);
    }

    #[test]
    fn calls_in_a_long_pause_are_probes_until_one_succeeds() {
        let mut s = state(Script::new(Quota::unlimited()));
        let (id, _) = s.arrive(ms(0), None, 0, 1.0);
        s.tell(ms(0), id, Duration::from_secs(3600));
        let (probe, _) = s.arrive(ms(400_000), None, 0, 1.0);
        assert!(s.records[probe].probe && !s.records[probe].early);
        s.succeeded(probe);
        let (next, _) = s.arrive(ms(402_000), None, 0, 1.0);
        assert!(!s.records[next].probe && !s.records[next].early);
    }
}
