//! Slots whose call was dropped, but may still run at the provider.

use std::{cmp::Reverse, collections::BinaryHeap};

use crate::clock::Time;

/// The instants at which they count as free. At most one for each busy slot,
/// so the ceiling bounds it.
#[derive(Default)]
pub(super) struct Lingering(BinaryHeap<Reverse<Time>>);

impl Lingering {
    pub(super) fn push(&mut self, until: Time) {
        self.0.push(Reverse(until));
    }

    /// Removes those whose instant has come, and counts them.
    pub(super) fn reap(&mut self, now: Time) -> u32 {
        let before = self.0.len();
        while self.next().is_some_and(|until| until <= now) {
            self.0.pop();
        }
        (before - self.0.len()) as u32
    }

    pub(super) fn next(&self) -> Option<Time> {
        self.0.peek().map(|&Reverse(until)| until)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
