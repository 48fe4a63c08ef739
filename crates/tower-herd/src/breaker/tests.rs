//! The counting part, without time and without calls.

use super::{
    BreakerSettings, Cell,
    state::{Recent, Window},
};
use crate::{
    Kind, Mode, Switch, Time,
    provider::{Effect, Verdict},
};
use proptest::prelude::*;
use std::time::Duration;

const SUCCESS: Verdict = Verdict::Reply(Kind::Success);
const FAILED: Verdict = Verdict::Reply(Kind::Failed);

fn cell(settings: BreakerSettings) -> Cell {
    let cell = Cell::default();
    cell.configure(settings, "p").unwrap();
    let _ = cell.settings();
    cell
}

/// The `start`-th call has come to this; whether that trips it.
fn settle(cell: &Cell, start: u64, verdict: Verdict) -> bool {
    matches!(cell.settled(cell.epoch(), start, verdict, || Time::ZERO), Some(Effect::Tripped(_)))
}

/// All settled calls, and what the last `size` of them by their start say.
#[derive(Default)]
struct Model(Vec<(u64, bool)>);

impl Model {
    fn settle(&mut self, start: u64, failed: bool, size: usize, trip: usize) -> bool {
        self.0.push((start, failed));
        // Stable: of two with one start the later settled is the later.
        self.0.sort_by_key(|(start, _)| *start);
        let last = &self.0[self.0.len().saturating_sub(size)..];
        last.iter().filter(|(_, failed)| *failed).count() >= trip
    }
}

proptest! {
    #[test]
    fn a_window_trips_when_all_calls_sorted_by_start_say_so(
        size in 1usize..30,
        ratio in 0.01f64..=1.0,
        calls in proptest::collection::vec((0u64..200, any::<bool>()), 1..300),
    ) {
        let trip = BreakerSettings::new().window(size as u32).ratio(ratio).trip();
        let (mut window, mut model) = (Window::new(size, trip), Model::default());
        for (start, failed) in calls {
            let tripped = window.push(start, failed);
            prop_assert_eq!(tripped, model.settle(start, failed, size, trip));
            prop_assert!(window.len() <= size);
            if tripped {
                return Ok(());
            }
        }
    }

    /// The whole, which writes successes down without a lock while nothing fails. Calls may overtake each
    /// other by as many as the window is long.
    #[test]
    fn a_breaker_trips_when_all_calls_sorted_by_start_say_so(
        size in 1u32..30,
        ratio in 0.3f64..=1.0,
        seed in any::<u64>(),
        rates in proptest::collection::vec(0u32..=100, 1..8),
    ) {
        let settings = BreakerSettings::new().window(size).ratio(ratio);
        let (cell, mut model) = (cell(settings), Model::default());
        let mut random = fastrand::Rng::with_seed(seed);
        let mut flying: Vec<(u64, bool)> = Vec::new();
        let mut start = 0;
        for rate in rates {
            for _ in 0..100 {
                flying.push((start, random.u32(0..100) < rate));
                start += 1;
                if flying.len() < size as usize && random.bool() {
                    continue;
                }
                let (start, failed) = flying.swap_remove(random.usize(..flying.len()));
                let tripped = settle(&cell, start, if failed { FAILED } else { SUCCESS });
                let expected = model.settle(start, failed, size as usize, settings.trip()) && failed;
                prop_assert_eq!(tripped, expected, "call {}", start);
                if tripped {
                    return Ok(());
                }
            }
        }
    }

    /// Of one provider, in any order of its calls, no call of an earlier epoch changes anything.
    #[test]
    fn calls_of_an_earlier_epoch_are_ignored(
        calls in proptest::collection::vec((0usize..40, 0u8..5), 1..200),
    ) {
        let cell = cell(BreakerSettings::strict());
        let mut flying: Vec<(u32, u64)> = Vec::new();
        let (mut epoch, mut open, mut row, mut start) = (cell.epoch(), false, Vec::new(), 0);
        for (which, step) in calls {
            match step {
                // A call starts.
                0 | 1 => {
                    flying.push((cell.epoch(), start));
                    start += 1;
                }
                // An operator, or a probe, closes it.
                2 if open => {
                    cell.closed();
                    (open, row) = (false, Vec::new());
                    prop_assert_ne!(cell.epoch(), epoch);
                    epoch = cell.epoch();
                }
                _ if flying.is_empty() => {}
                // One ends, well or badly.
                step => {
                    let (sent, at) = flying.swap_remove(which % flying.len());
                    let failed = step == 3;
                    let effect =
                        cell.settled(sent, at, if failed { FAILED } else { SUCCESS }, || Time::ZERO);
                    if sent != epoch {
                        prop_assert_eq!(effect, None, "of an earlier epoch");
                        continue;
                    }
                    if open {
                        prop_assert_eq!(effect, failed.then_some(Effect::ProbeFailed(Time::ZERO)));
                        continue;
                    }
                    row.push((at, failed));
                    row.sort_unstable();
                    let last = &row[row.len().saturating_sub(5)..];
                    let trips = failed && last.len() == 5 && last.iter().all(|(_, failed)| *failed);
                    prop_assert_eq!(matches!(effect, Some(Effect::Tripped(_))), trips);
                    if trips {
                        open = true;
                        prop_assert_ne!(cell.epoch(), epoch);
                        epoch = cell.epoch();
                    }
                }
            }
        }
    }
}

/// How many failures in a row it takes after these successes.
fn failures_until_trip(cell: &Cell, successes: u64) -> u64 {
    (0..successes).for_each(|start| assert!(!settle(cell, start, SUCCESS)));
    (1..=1000).find(|n| settle(cell, successes + n, FAILED)).expect("never")
}

#[test]
fn a_dead_provider_trips_after_few_calls_however_long_it_was_well() {
    for successes in [0, 1, 7, 1_000_000] {
        assert_eq!(failures_until_trip(&cell(BreakerSettings::new()), successes), 18);
        assert_eq!(failures_until_trip(&cell(BreakerSettings::strict()), successes), 5);
    }
    // The peer's window never slides: there it took about a million.
    let half = BreakerSettings::new().window(100).ratio(0.5);
    assert_eq!(failures_until_trip(&cell(half), 1_000_000), 50);
}

/// An hour of 100 calls a second, which settle in the order of their start.
fn trips_in_an_hour(settings: BreakerSettings, failing: f64, seed: u64) -> bool {
    let cell = cell(settings);
    let mut random = fastrand::Rng::with_seed(seed);
    (0..360_000).any(|start| settle(&cell, start, if random.f64() < failing { FAILED } else { SUCCESS }))
}

#[test]
fn a_brownout_does_not_trip_it() {
    for seed in 0..5 {
        for failing in [0.05, 0.2, 0.3] {
            assert!(!trips_in_an_hour(BreakerSettings::new(), failing, seed), "seed {seed}, {failing}");
        }
        assert!(trips_in_an_hour(BreakerSettings::new(), 0.95, seed), "seed {seed}");
        assert!(trips_in_an_hour(BreakerSettings::strict(), 0.2, seed), "seed {seed}: five in a row do");
    }
}

/// Why n in a row is not the default: with a flat open time and no early probe, hardly a call passes a
/// provider that serves four of five.
#[test]
fn consecutive_failures_shut_out_a_provider_that_serves_most() {
    let vectors: serde_json::Value =
        serde_json::from_str(include_str!("../../tests/vectors/ramp_and_breaker.json")).unwrap();
    for case in vectors["consecutive_trip"]["cases"].as_array().unwrap() {
        let (failing, expected) = (case["p"].as_f64().unwrap(), case["success"].as_f64().unwrap());
        let (mut served, mut offered) = (0.0, 0.0);
        let mut random = fastrand::Rng::with_seed(7);
        let mut start = 0;
        // As many cycles as make the share certain to a few percent.
        for _ in 0..2000 {
            let cell = cell(BreakerSettings::strict());
            loop {
                start += 1;
                offered += 1.0;
                let failed = random.f64() < failing;
                served += f64::from(!failed);
                if settle(&cell, start, if failed { FAILED } else { SUCCESS }) {
                    break;
                }
                if offered > 1.2e7 {
                    break;
                }
            }
            offered += 600.0 * 100.0;
            if offered > 1.2e7 {
                break;
            }
        }
        let share: f64 = served / offered;
        // A fifth of a small share, or a share of none would pass for it.
        let tolerance = f64::min(0.05, expected / 5.0);
        assert!((share - expected).abs() < tolerance, "{failing}: {share} and not {expected}");
    }
}

#[test]
fn what_is_neither_success_nor_failure_counts_as_neither() {
    let neutral = [
        Verdict::Reply(Kind::Throttled),
        Verdict::Reply(Kind::Depleted),
        Verdict::Reply(Kind::Misconfigured),
        Verdict::Reply(Kind::Rejected),
        Verdict::Reply(Kind::Refused),
        Verdict::Dropped,
    ];
    for verdict in neutral {
        let cell = cell(BreakerSettings::strict());
        for start in 0..100 {
            assert!(!settle(&cell, start, verdict), "{verdict:?}");
        }
        // Between failures they neither count nor clear.
        for start in 100..104 {
            assert!(!settle(&cell, start, FAILED) && !settle(&cell, start, verdict), "{verdict:?}");
        }
        assert!(settle(&cell, 104, FAILED), "{verdict:?}");
    }
    for failure in [FAILED, Verdict::Reply(Kind::Overloaded), Verdict::TimedOut] {
        let cell = cell(BreakerSettings::strict());
        assert_eq!((0..5).filter(|start| settle(&cell, *start, failure)).count(), 1, "{failure:?}");
    }
    for success in [SUCCESS, Verdict::Reply(Kind::Empty)] {
        let cell = cell(BreakerSettings::strict());
        (0..4).for_each(|start| assert!(!settle(&cell, start, FAILED)));
        assert!(!settle(&cell, 4, success) && !settle(&cell, 5, FAILED), "{success:?}");
    }
}

/// Calls that hung for their whole timeout come back long after those that were sent later and went well.
#[test]
fn a_burst_of_old_timeouts_does_not_trip_a_provider_that_has_recovered() {
    for between in [0, 19, 20, 5000] {
        let cell = cell(BreakerSettings::new());
        for start in 100..100 + between {
            settle(&cell, start, SUCCESS);
        }
        let trips = (0..20).any(|start| settle(&cell, start, FAILED));
        assert_eq!(trips, between < 3, "{between} later successes");
        assert!(trips || cell.failures() == usize::from(between == 19), "{between}: one place was left");
    }
}

#[test]
fn nothing_is_counted_while_it_is_off() {
    let cell = cell(BreakerSettings::strict());
    let switch = Switch::new(Mode::Off);
    cell.set_switch(&switch);
    assert!(!(0..50).any(|start| settle(&cell, start, FAILED)) && cell.failures() == 0);
    switch.set(Mode::Observe);
    assert_eq!((50..100).position(|start| settle(&cell, start, FAILED)), Some(4));
}

#[test]
fn memory_is_fixed() {
    let mut window = Window::new(20, 18);
    assert!(!(0..100_000).any(|start| window.push(start, start % 3 == 0)));
    assert_eq!(window.len(), 20);
    let recent = Recent::new(20);
    (0..100_000).for_each(|start| recent.push(start));
    let starts = recent.starts();
    assert!(starts.len() <= 8 * 64 && starts.ends_with(&[99_998, 99_999]), "{}", starts.len());
}

#[test]
fn settings_that_cannot_be_name_their_field() {
    let good = BreakerSettings::new;
    let second = Duration::from_secs(1);
    for (settings, field) in [
        (good().window(0), "window"),
        (good().window(1001), "window"),
        (good().ratio(0.0), "ratio"),
        (good().ratio(1.1), "ratio"),
        (good().ratio(f64::NAN), "ratio"),
        (good().open(Duration::ZERO), "open"),
        (good().open(Duration::MAX), "open"),
        (good().probes(Duration::ZERO, second), "first_probe"),
        (good().probes(second, second), "last_probe"),
        (good().probes(second, Duration::MAX), "last_probe"),
        (good().probe_timeout(Duration::ZERO), "probe_timeout"),
    ] {
        assert_eq!(settings.check("p").unwrap_err().field, field, "{settings:?}");
    }
    for (window, ratio, trip) in [
        (20, 0.9, 18),
        (5, 1.0, 5),
        (100, 0.5, 50),
        (100, 0.07, 7),
        (3, 0.5, 2),
        (10, 0.001, 1),
        (10, 0.3, 3),
    ] {
        let settings = good().window(window).ratio(ratio);
        assert!(settings.check("p").is_ok());
        assert_eq!(settings.trip(), trip, "{window} at {ratio}");
    }
}

#[cfg(feature = "serde")]
#[test]
fn settings_are_loaded_and_alerts_are_sent() {
    let json = r#"{ "window": 50, "ratio": 0.5 }"#;
    let settings: BreakerSettings = serde_json::from_str(json).unwrap();
    assert_eq!(settings, BreakerSettings::new().window(50).ratio(0.5));
    assert!(serde_json::from_str::<BreakerSettings>(r#"{ "windows": 50 }"#).is_err());
    let cell = cell(BreakerSettings::strict());
    assert!((0..5).any(|start| settle(&cell, start, FAILED)));
    let about = super::About { provider: "p", scope: Some("s"), clock: crate::Clock::new(), now: Time::ZERO };
    let alert = cell.opened(Time::MAX, 7, &about).expect("the first of its incident");
    let json = serde_json::to_value(&alert).unwrap();
    assert_eq!((&json["kind"], &json["incident"]), (&"broken".into(), &"0000000000000007".into()));
    assert_eq!((&json["scope"], &json["failures"]), (&"s".into(), &5.into()));
    assert!(cell.opened(Time::MAX, 8, &about).is_none(), "the same incident");
}
