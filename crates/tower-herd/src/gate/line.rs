//! The line of one class: in turns over agents, first come first served in each.

use std::collections::{BTreeMap, BTreeSet};

/// Who asks. Waiters without one share a place, so that dropping one's name
/// gains nothing.
pub(super) type Agent = Option<u64>;

/// Those of one class who wait to be called.
///
/// An agent with waiters holds one *turn*, a number drawn when its first waiter
/// came and drawn anew whenever one of its waiters is called. The lowest turn
/// goes first. This is start-time fair queueing of equal weights with a virtual
/// clock that ticks at each draw: a newcomer stands behind every agent that is
/// already here, so that a stream of new agents cannot starve an old one (they
/// can where the clock is the start tag in service), and an agent that has no
/// waiter leaves nothing behind.
#[derive(Default)]
pub(super) struct Line {
    lanes: BTreeMap<Agent, Lane>,
    turns: BTreeMap<u64, Agent>,
    arrivals: BTreeSet<u64>,
}

struct Lane {
    turn: u64,
    waiters: BTreeSet<u64>,
}

impl Line {
    pub(super) fn is_empty(&self) -> bool {
        self.arrivals.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.arrivals.len()
    }

    /// Who came first, whoever's turn it is.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.arrivals.first().copied()
    }

    /// Who would be called next.
    pub(super) fn head(&self) -> Option<u64> {
        let (_, agent) = self.turns.first_key_value()?;
        self.lanes[agent].waiters.first().copied()
    }

    /// Adds a waiter, new or one that comes back to the place it had: an agent
    /// keeps the lower of its turn and `turn`.
    pub(super) fn insert(&mut self, agent: Agent, waiter: u64, turn: u64) {
        self.arrivals.insert(waiter);
        if !self.give_back(agent, turn) {
            self.turns.insert(turn, agent);
            let waiters = BTreeSet::new();
            self.lanes.insert(agent, Lane { turn, waiters });
        }
        if let Some(lane) = self.lanes.get_mut(&agent) {
            lane.waiters.insert(waiter);
        }
    }

    /// The agent did not use `turn` after all. False if it is not here.
    pub(super) fn give_back(&mut self, agent: Agent, turn: u64) -> bool {
        let Some(lane) = self.lanes.get_mut(&agent) else {
            return false;
        };
        if turn < lane.turn {
            self.turns.remove(&lane.turn);
            self.turns.insert(turn, agent);
            lane.turn = turn;
        }
        true
    }

    /// Takes the head; its agent, if it has more, goes on with the turn `next`.
    /// The waiter, and the turn it used.
    pub(super) fn pop(&mut self, next: u64) -> Option<(u64, u64)> {
        let (turn, agent) = self.turns.pop_first()?;
        let lane = self.lanes.get_mut(&agent)?;
        let waiter = lane.waiters.pop_first()?;
        self.arrivals.remove(&waiter);
        if lane.waiters.is_empty() {
            self.lanes.remove(&agent);
        } else {
            lane.turn = next;
            self.turns.insert(next, agent);
        }
        Some((waiter, turn))
    }

    /// Removes a waiter from anywhere; those of its agent keep the turn, which
    /// is returned.
    pub(super) fn remove(&mut self, agent: Agent, waiter: u64) -> Option<u64> {
        let lane = self.lanes.get_mut(&agent)?;
        if !lane.waiters.remove(&waiter) {
            return None;
        }
        let turn = lane.turn;
        if lane.waiters.is_empty() {
            self.turns.remove(&turn);
            self.lanes.remove(&agent);
        }
        self.arrivals.remove(&waiter);
        Some(turn)
    }

    /// How many would be called before this one if nobody came or left.
    pub(super) fn ahead(&self, agent: Agent, waiter: u64) -> usize {
        let Some(mine) = self.lanes.get(&agent) else {
            return 0;
        };
        let rank = mine.waiters.range(..waiter).count();
        let others = self.lanes.iter().filter(|(other, _)| **other != agent);
        let passed = others.map(|(_, lane)| {
            let rounds = rank + usize::from(lane.turn < mine.turn);
            lane.waiters.len().min(rounds)
        });
        rank + passed.sum::<usize>()
    }

    #[cfg(all(test, not(herd_loom)))]
    pub(super) fn agents(&self) -> usize {
        debug_assert_eq!(self.lanes.len(), self.turns.len());
        self.lanes.len()
    }
}
