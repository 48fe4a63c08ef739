//! Random schedules of a gate and an executor, against what must always hold.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Wake, Waker},
    time::Duration,
};

use proptest::prelude::*;

use super::{trial::Trial, *};

#[derive(Default)]
struct Flag {
    woken: AtomicBool,
    count: Arc<AtomicUsize>,
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, SeqCst);
        self.count.fetch_add(1, SeqCst);
    }
}

#[derive(Clone, Debug)]
enum Op {
    Enqueue(Option<u64>, bool),
    /// Polls one task that has been woken, is new, or whose timer is due.
    Run(usize),
    Spurious(usize),
    Cancel(usize),
    TryAcquire,
    TryAdmit,
    Release,
    Linger(u64),
    SetCap(u32),
    PacerCap(u32),
    Pause(u64),
    Spacing(u64),
    Inner(Option<u32>),
    Advance(u64),
    Settle,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        6 => (proptest::option::of(0..4u64), any::<bool>()).prop_map(|(a, b)| Op::Enqueue(a, b)),
        8 => (0..50usize).prop_map(Op::Run),
        1 => (0..50usize).prop_map(Op::Spurious),
        2 => (0..50usize).prop_map(Op::Cancel),
        2 => Just(Op::TryAcquire),
        1 => Just(Op::TryAdmit),
        5 => Just(Op::Release),
        2 => (0..4000u64).prop_map(Op::Linger),
        1 => (0..5u32).prop_map(Op::SetCap),
        1 => (0..5u32).prop_map(Op::PacerCap),
        1 => (0..4000u64).prop_map(Op::Pause),
        1 => (0..300u64).prop_map(Op::Spacing),
        1 => proptest::option::of(0..3u32).prop_map(Op::Inner),
        2 => (0..1500u64).prop_map(Op::Advance),
        3 => Just(Op::Settle),
    ];
    proptest::collection::vec(op, 1..120)
}

struct Task {
    id: EntryId,
    flag: Arc<Flag>,
    new: bool,
    timer: Option<Time>,
}

struct World {
    gate: Gate<Trial>,
    now: Time,
    tasks: Vec<Task>,
    out: u32,
    lingering: Vec<Time>,
    limit: u32,
    wakes: Arc<AtomicUsize>,
}

const BOUND: usize = 12;

fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

impl World {
    fn new() -> Self {
        let config = QueueConfig { bound: BOUND, ..QueueConfig::default() };
        World {
            gate: Gate::new(Trial::fixed(2), config),
            now: Time::ZERO,
            tasks: Vec::new(),
            out: 0,
            lingering: Vec::new(),
            limit: MAX_CAP,
            wakes: Arc::default(),
        }
    }

    fn runnable(&self) -> Vec<usize> {
        let ready = |task: &Task| {
            task.new || task.flag.woken.load(SeqCst) || task.timer.is_some_and(|timer| timer <= self.now)
        };
        (0..self.tasks.len()).filter(|&task| ready(&self.tasks[task])).collect()
    }

    fn poll(&mut self, index: usize) {
        let cap = self.gate.cap();
        let task = &mut self.tasks[index];
        task.new = false;
        task.flag.woken.store(false, SeqCst);
        let waker = Waker::from(task.flag.clone());
        let mut cx = Context::from_waker(&waker);
        match self.gate.poll_claim(task.id, self.now, &mut cx) {
            Claimed::Got(()) => {
                self.tasks.remove(index);
                self.out += 1;
                assert!(self.gate.busy() <= cap, "admitted above the ceiling");
            }
            Claimed::Wait { again_at } => {
                assert!(again_at.is_none_or(|at| at > self.now), "told the past");
                task.timer = again_at;
                assert!(!task.flag.woken.load(SeqCst), "woke itself");
            }
        }
    }

    fn apply(&mut self, op: &Op) {
        let woken = self.wakes.load(SeqCst);
        match *op {
            Op::Enqueue(agent, interactive) => {
                let class = if interactive { Class::Interactive } else { Class::Batch };
                let full = self.tasks.len() >= BOUND;
                let now = self.now;
                match self.gate.enqueue(Waiter { agent, class, now }) {
                    Ok(id) => {
                        assert!(!full);
                        let flag = Flag { count: self.wakes.clone(), ..Flag::default() };
                        self.tasks.push(Task { id, flag: Arc::new(flag), new: true, timer: None });
                    }
                    Err(Full) => assert!(full),
                }
            }
            Op::Run(pick) => {
                let runnable = self.runnable();
                if !runnable.is_empty() {
                    self.poll(runnable[pick % runnable.len()]);
                }
            }
            Op::Spurious(pick) if !self.tasks.is_empty() => self.poll(pick % self.tasks.len()),
            Op::Cancel(pick) if !self.tasks.is_empty() => {
                let task = self.tasks.remove(pick % self.tasks.len());
                self.gate.cancel(task.id);
            }
            Op::TryAcquire => {
                let before = self.gate.occupancy();
                let slow = self.gate.read_pacer(|pacer| pacer.published().slow);
                let room = before.busy < before.cap && !slow && self.tasks.is_empty();
                assert_eq!(self.gate.try_acquire(), room);
                self.out += u32::from(room);
            }
            Op::TryAdmit => {
                let admitted = self.gate.try_admit(self.now).is_ok();
                self.out += u32::from(admitted);
                let after = self.gate.occupancy();
                assert!(!admitted || after.busy <= after.cap);
            }
            Op::Release if self.out > 0 => {
                self.out -= 1;
                self.gate.release();
                assert!(self.wakes.load(SeqCst) <= woken + 1, "one release, two wakes");
            }
            Op::Linger(after) if self.out > 0 => {
                self.out -= 1;
                let until = self.now.saturating_add(millis(after));
                self.lingering.push(until);
                self.gate.release_at(until);
                assert!(self.wakes.load(SeqCst) <= woken + 1, "one release, two wakes");
            }
            Op::SetCap(cap) => {
                self.limit = cap;
                let seen = self.gate.set_cap(cap);
                assert!(seen.cap <= cap && seen.busy == self.gate.busy());
            }
            Op::PacerCap(cap) => self.gate.with_pacer(|pacer| pacer.cap = cap),
            Op::Pause(wait) => {
                let until = self.now.saturating_add(millis(wait));
                self.gate.with_pacer(|pacer| pacer.pause(until));
            }
            Op::Spacing(wait) => self.gate.with_pacer(|pacer| pacer.spacing = millis(wait)),
            Op::Inner(limit) => self.gate.with_pacer(|pacer| pacer.inner = limit),
            Op::Advance(wait) => self.now = self.now.saturating_add(millis(wait)),
            Op::Settle => self.quiesce(),
            _ => {}
        }
        self.check();
    }

    fn check(&self) {
        let lingering = self.gate.lingering();
        let still = self.lingering.iter().filter(|&&until| until > self.now);
        assert!(lingering >= still.count() && lingering <= self.lingering.len());
        assert_eq!(self.gate.busy(), self.out + lingering as u32);
        assert_eq!(self.gate.waiting(), self.tasks.len());
        let cap = self.gate.read_pacer(|pacer| pacer.cap).min(self.limit);
        assert_eq!(self.gate.cap(), cap);
        self.gate.check_queue();
    }

    /// Runs what is to be run until nothing is. Then nobody is stranded, though
    /// none was polled who was not woken.
    fn quiesce(&mut self) {
        let mut steps = 0;
        while let Some(&index) = self.runnable().first() {
            self.poll(index);
            steps += 1;
            assert!(steps < 1000, "they wake each other for ever");
        }
        let Some(busy) = (!self.tasks.is_empty()).then(|| self.gate.busy()) else {
            return;
        };
        let free = busy < self.gate.cap();
        let answer = self.gate.read_pacer(|pacer| pacer.clone().admit(self.now, busy, 1));
        let reaping = self.lingering.iter().filter(|&&until| until > self.now).min();
        let expected = match answer {
            _ if !free => reaping,
            Ok(()) => panic!("a free slot and a waiter are stranded"),
            Err(Blocked::Slot) => reaping,
            Err(Blocked::Until(ref at)) => Some(at),
        };
        let told = self.tasks.iter().filter_map(|task| task.timer).min();
        // Whoever is told too early comes and asks again; too late is lost.
        if let Some(expected) = expected {
            assert!(told.is_some_and(|told| told <= *expected), "nobody keeps the time");
        }
    }

    /// Whatever happened, all are served once slots come back and time passes.
    fn drain(mut self) {
        self.quiesce();
        let mut steps = 0;
        self.gate.set_cap(1);
        self.limit = 1;
        self.gate.with_pacer(|pacer| {
            pacer.cap = pacer.cap.max(1);
            pacer.inner = None;
        });
        while !self.tasks.is_empty() {
            self.quiesce();
            self.check();
            if self.out > 0 {
                self.apply(&Op::Release);
            } else if let Some(timer) = self.tasks.iter().filter_map(|task| task.timer).min() {
                self.now = self.now.max(timer);
            } else {
                assert!(self.tasks.is_empty(), "stranded");
            }
            steps += 1;
            assert!(steps < 1000);
        }
        while self.out > 0 {
            self.apply(&Op::Release);
        }
        self.now = Time::MAX;
        self.gate.with_pacer(|pacer| pacer.spacing = Duration::ZERO);
        assert_eq!(self.gate.try_admit(self.now), Ok(()));
        assert_eq!(self.gate.busy(), 1);
        assert!(!self.gate.try_acquire());
        self.gate.release();
        assert!(self.gate.try_acquire(), "a flag was left");
    }
}

/// 1000, more if `PROPTEST_CASES` says so.
fn more_cases() -> ProptestConfig {
    let mut config = ProptestConfig::default();
    config.cases = config.cases.max(1000);
    config
}

proptest! {
    #![proptest_config(more_cases())]

    #[test]
    fn nothing_is_stranded(ops in ops()) {
        let mut world = World::new();
        for op in &ops {
            world.apply(op);
        }
        world.drain();
    }
}
