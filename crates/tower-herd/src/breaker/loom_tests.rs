//! Every interleaving of a few calls that settle at once. See `gate::loom_tests` for how to run them.

use super::{BreakerSettings, Cell};
use crate::{
    Kind, Time,
    provider::{Effect, Verdict},
};
use loom::{sync::Arc, thread};

fn cell(window: u32) -> Arc<Cell> {
    let cell = Cell::default();
    cell.configure(BreakerSettings::new().window(window).ratio(1.0), "p").unwrap();
    let _ = cell.settings();
    Arc::new(cell)
}

fn settle(cell: &Cell, epoch: u32, start: u64, kind: Kind) -> bool {
    let effect = cell.settled(epoch, start, Verdict::Reply(kind), || Time::ZERO);
    matches!(effect, Some(Effect::Tripped(_)))
}

/// However many failures are there at once, one of them trips it, and the epoch moves once.
#[test]
fn loom_one_trip() {
    loom::model(|| {
        let cell = cell(2);
        let epoch = cell.epoch();
        let other = {
            let cell = cell.clone();
            thread::spawn(move || (0..2).filter(|n| settle(&cell, epoch, 2 * n, Kind::Failed)).count())
        };
        let mine = (0..2).filter(|n| settle(&cell, epoch, 2 * n + 1, Kind::Failed)).count();
        assert_eq!(other.join().unwrap() + mine, 1);
        assert_eq!(cell.epoch(), epoch + 1);
    });
}

/// A success that is settled while the first failure comes may be missed by it; those that come after both
/// are not, and the failure is forgotten in their course.
#[test]
fn loom_a_failure_does_not_outlive_the_window() {
    loom::model(|| {
        let cell = cell(2);
        let epoch = cell.epoch();
        let other = {
            let cell = cell.clone();
            thread::spawn(move || assert!(!settle(&cell, epoch, 1, Kind::Success)))
        };
        assert!(!settle(&cell, epoch, 0, Kind::Failed));
        other.join().unwrap();
        for start in 2..4 {
            assert!(!settle(&cell, epoch, start, Kind::Success));
        }
        assert_eq!(cell.failures(), 0, "every success went into the window");
        assert!(!settle(&cell, epoch, 4, Kind::Failed), "its last two are a success and a failure");
        assert!(settle(&cell, epoch, 5, Kind::Failed));
    });
}

/// What settles while it closes counts in the epoch it was sent in, or nowhere.
#[test]
fn loom_closing() {
    loom::model(|| {
        let cell = cell(1);
        assert!(settle(&cell, 0, 0, Kind::Failed));
        let open = cell.epoch();
        let other = {
            let cell = cell.clone();
            thread::spawn(move || assert!(!settle(&cell, open, 1, Kind::Failed)))
        };
        cell.closed();
        other.join().unwrap();
        assert_eq!(cell.failures(), 0, "a probe's failure is none of the closed breaker");
        assert!(settle(&cell, cell.epoch(), 2, Kind::Failed));
    });
}
