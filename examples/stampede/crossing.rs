//! Which calls came early, and which only crossed the reply that would have held them back.
//!
//! A provider marks every call that arrives inside a pause it has announced. Over a socket that is one
//! mark too many for a call that left before its caller had read the announcement: nobody is to blame, and
//! on a busy machine the two may cross for many milliseconds. So the mark stays only where the caller had
//! read the reply by then. The mark itself is the provider's; nothing is counted early that it did not mark.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use tower_herd_sim::provider::{CallRecord, Outcome};

/// From reading a reply's head to acting on it: a thread may be put aside in between.
const REACTION: Duration = Duration::from_millis(25);

/// Takes the mark from what crossed. `records` are the provider's, `sent` the same calls in the caller's
/// book, `hint` what each refusal asks for.
pub fn forgive(records: &mut [CallRecord], sent: &[CallRecord], hint: Duration) {
    let refused = sent.iter().filter(|call| call.outcome == Outcome::Throttled);
    let read: Vec<Duration> = refused.filter_map(|call| call.ended).collect();
    // The calls of one task at one rung follow each other, so they arrive in the order in which they left.
    let mut left: BTreeMap<Option<u64>, VecDeque<Duration>> = BTreeMap::new();
    for call in sent {
        left.entry(call.task).or_default().push_back(call.arrival);
    }
    for record in records {
        let Some(left) = left.get_mut(&record.task).and_then(VecDeque::pop_front) else { continue };
        record.early &= read.iter().any(|read| (*read + REACTION..*read + hint).contains(&left));
    }
}
