//! The order of the queue by itself.

use std::{collections::BTreeMap, time::Duration};

use proptest::prelude::*;

use super::queue::{Class, EntryId, Queue, QueueConfig, Waiter};
use crate::clock::Time;

const AGE: u64 = 50;

fn queue() -> Queue {
    let age = Duration::from_nanos(AGE);
    Queue::new(QueueConfig { age, ..QueueConfig::default() })
}

#[derive(Clone, Debug)]
enum Op {
    Push(u64, bool),
    Serve,
    /// Called, but no slot.
    CallInVain,
    /// Called, then gone.
    CallAndCancel,
    Cancel(usize),
    Wait(u64),
}

fn ops(batch: bool) -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        6 => (0..5u64, any::<bool>()).prop_map(move |(agent, b)| Op::Push(agent, b && batch)),
        4 => Just(Op::Serve),
        1 => Just(Op::CallInVain),
        1 => Just(Op::CallAndCancel),
        1 => (0..50usize).prop_map(Op::Cancel),
        2 => (0..30u64).prop_map(Op::Wait),
    ];
    proptest::collection::vec(op, 1..150)
}

#[derive(Clone, Copy)]
struct Seen {
    id: EntryId,
    agent: u64,
    class: Class,
    since: Time,
}

/// A queue and what is known of its waiters, the oldest first.
struct World {
    queue: Queue,
    now: Time,
    waiting: Vec<Seen>,
}

impl World {
    fn new() -> Self {
        World { queue: queue(), now: Time::ZERO, waiting: Vec::new() }
    }

    fn push(&mut self, agent: u64, batch: bool) {
        let class = if batch { Class::Batch } else { Class::Interactive };
        let (now, since) = (self.now, self.now);
        let waiter = Waiter { agent: Some(agent), class, now };
        let id = self.queue.push(waiter).unwrap();
        self.waiting.push(Seen { id, agent, class, since });
    }

    fn serve(&mut self) -> Option<Seen> {
        let head = self.queue.head(self.now);
        let called = self.queue.call_next(self.now).map(|(id, _)| id);
        assert_eq!(head, called);
        let id = called?;
        self.queue.serve(id);
        let at = self.waiting.iter().position(|seen| seen.id == id).unwrap();
        Some(self.waiting.remove(at))
    }

    /// Who was served, if anybody was.
    fn apply(&mut self, op: &Op) -> Option<Seen> {
        match *op {
            Op::Push(agent, batch) => self.push(agent, batch),
            Op::Serve => return self.serve(),
            Op::CallInVain => {
                if let Some((id, _)) = self.queue.call_next(self.now) {
                    self.queue.put_back(id);
                    assert_eq!(self.queue.head(self.now), Some(id), "lost its place");
                }
            }
            Op::CallAndCancel => {
                if let Some((id, _)) = self.queue.call_next(self.now) {
                    self.queue.cancel(id);
                    self.waiting.retain(|seen| seen.id != id);
                }
            }
            Op::Cancel(pick) if !self.waiting.is_empty() => {
                let seen = self.waiting.remove(pick % self.waiting.len());
                self.queue.cancel(seen.id);
            }
            Op::Wait(nanos) => self.now = self.now.saturating_add(Duration::from_nanos(nanos)),
            Op::Cancel(_) => {}
        }
        assert_eq!(self.queue.len(), self.waiting.len());
        None
    }

    fn of(&self, class: Class) -> impl Iterator<Item = &Seen> {
        self.waiting.iter().filter(move |seen| seen.class == class)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    /// In an agent and class whoever came first is served first.
    #[test]
    fn fifo_in_an_agent(ops in ops(true)) {
        let mut world = World::new();
        for op in &ops {
            if let Some(served) = world.apply(op) {
                let earlier = world.of(served.class).find(|seen| seen.agent == served.agent);
                prop_assert!(earlier.is_none_or(|seen| seen.id > served.id));
            }
        }
    }

    /// While an agent waits, no other is served twice: over any stretch in which
    /// two agents wait their services differ by one at most.
    #[test]
    fn agents_take_turns(ops in ops(false)) {
        let mut world = World::new();
        // since this agent began to wait or was last served: services of others
        let mut others: BTreeMap<u64, BTreeMap<u64, u32>> = BTreeMap::new();
        for op in &ops {
            let served = world.apply(op);
            others.retain(|agent, _| world.waiting.iter().any(|seen| seen.agent == *agent));
            if let Some(served) = served {
                others.remove(&served.agent);
                for counts in others.values_mut() {
                    let count = counts.entry(served.agent).or_default();
                    *count += 1;
                    prop_assert!(*count <= 1, "served twice while another waited");
                }
            }
            for seen in &world.waiting {
                others.entry(seen.agent).or_default();
            }
        }
    }

    /// Interactive first; but while a batch waiter is old, of two services one is
    /// batch, and one is not.
    #[test]
    fn ageing_alternates(ops in ops(true)) {
        let mut world = World::new();
        let mut last = None;
        for op in &ops {
            let old = world.of(Class::Batch).next().is_some_and(|seen| {
                world.now.saturating_since(seen.since) > Duration::from_nanos(AGE)
            });
            let interactive = world.of(Class::Interactive).next().is_some();
            let batch = world.of(Class::Batch).next().is_some();
            if let Some(served) = world.apply(op) {
                if interactive && batch {
                    let turn = old && last == Some(Class::Interactive);
                    let expected = if turn { Class::Batch } else { Class::Interactive };
                    prop_assert_eq!(served.class, expected);
                }
                last = Some(served.class);
            }
        }
    }

    /// A position is how many are served before.
    #[test]
    fn positions_come_true(ops in ops(true)) {
        let mut world = World::new();
        for op in ops.iter().filter(|op| !matches!(op, Op::Wait(_))) {
            world.apply(op);
        }
        let ids = world.waiting.iter().map(|seen| seen.id);
        let said: BTreeMap<_, _> = ids.map(|id| (id, world.queue.position(id))).collect();
        for place in 0.. {
            let Some(served) = world.serve() else {
                break;
            };
            prop_assert_eq!(said[&served.id], Some(place));
        }
        prop_assert_eq!(world.queue.agents(), 0);
    }
}

#[test]
fn a_crowd_of_one_agent_interleaves_with_others() {
    let mut world = World::new();
    (0..100).for_each(|_| world.push(7, false));
    world.push(8, false);
    world.push(9, false);
    world.push(8, false);
    let agents: Vec<_> = (0..6).map(|_| world.serve().unwrap().agent).collect();
    assert_eq!(agents, [7, 8, 9, 7, 8, 7]);
}

#[test]
fn a_stream_of_new_agents_does_not_starve_an_old_one() {
    let mut world = World::new();
    world.push(0, false);
    world.push(0, false);
    let mut served = 0;
    for newcomer in 1..=4 {
        world.push(newcomer, false);
        served += u32::from(world.serve().unwrap().agent == 0);
    }
    assert_eq!(served, 2);
}

#[test]
fn the_nameless_share_one_turn() {
    let mut queue = queue();
    let now = Time::ZERO;
    let class = Class::Interactive;
    let mut push = |agent| queue.push(Waiter { agent, class, now }).unwrap();
    let [a, b, named] = [push(None), push(None), push(Some(1))];
    let order = [(); 3].map(|()| queue.call_next(now).unwrap().0);
    assert_eq!(order, [a, named, b]);
}
