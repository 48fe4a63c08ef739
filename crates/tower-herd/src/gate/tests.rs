//! One scene a rule.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Wake, Waker as StdWaker},
    thread,
    time::Duration,
};

use super::{trial::Trial, *};

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// A waiter polled by hand.
struct Hand {
    id: EntryId,
    count: Arc<Count>,
}

impl Hand {
    fn woken(&self) -> usize {
        self.count.0.load(SeqCst)
    }

    fn poll(&self, gate: &Gate<Trial>, now: Time) -> Claimed<()> {
        let waker = StdWaker::from(self.count.clone());
        gate.poll_claim(self.id, now, &mut Context::from_waker(&waker))
    }

    fn waits(&self, gate: &Gate<Trial>, now: Time) {
        assert_eq!(self.poll(gate, now), Claimed::Wait { again_at: None });
    }
}

fn gate(cap: u32) -> Gate<Trial> {
    Gate::new(Trial::fixed(cap), QueueConfig::default())
}

fn spec(agent: u64, class: Class, now: Time) -> Waiter {
    let agent = Some(agent);
    Waiter { agent, class, now }
}

/// Enqueued, and polled once.
fn waiter(gate: &Gate<Trial>, spec: Waiter) -> Hand {
    let id = gate.enqueue(spec).unwrap();
    let count = Arc::default();
    let hand = Hand { id, count };
    assert!(matches!(hand.poll(gate, spec.now), Claimed::Wait { .. }));
    hand
}

fn secs(secs: u64) -> Time {
    Time::ZERO.saturating_add(Duration::from_secs(secs))
}

use Class::{Batch, Interactive};

const T0: Time = Time::ZERO;
const GOT: Claimed<()> = Claimed::Got(());

fn told(at: Time) -> Claimed<()> {
    let again_at = Some(at);
    Claimed::Wait { again_at }
}

#[test]
fn the_word_keeps_its_parts_apart() {
    let word = Word::new(u32::MAX, u32::MAX, 0);
    assert_eq!(word.load().cap(), MAX_CAP);
    assert!(word.try_acquire());
    let bits = word.publish(3, 3, WAITING | SLOW | LINGERING);
    assert_eq!((bits.cap(), bits.busy(), bits.free()), (3, 1, 2));
    assert!(bits.has(WAITING) && bits.has(SLOW) && bits.has(LINGERING));
    assert!(!word.try_acquire());
    let bits = word.publish(0, 0, 0);
    assert_eq!((bits.cap(), bits.busy(), bits.free()), (0, 1, 0));
    assert!(!bits.has(WAITING | SLOW | LINGERING));
    word.release(1);
    assert_eq!(word.load().busy(), 0);
}

#[test]
fn shrinks_below_what_is_out() {
    let gate = gate(2);
    assert!(gate.try_acquire() && gate.try_acquire() && !gate.try_acquire());
    assert_eq!(gate.set_cap(0), Occupancy { cap: 0, busy: 2 });
    gate.release();
    gate.release();
    assert!(!gate.try_acquire());
    assert_eq!(gate.set_cap(9), Occupancy { cap: 2, busy: 0 });
    assert!(gate.try_acquire());
}

#[test]
fn newcomers_do_not_pass() {
    let gate = gate(1);
    assert!(gate.try_acquire());
    let first = waiter(&gate, spec(1, Batch, T0));
    gate.release();
    assert_eq!(first.woken(), 1);
    // free, but called for: not for the fast path, the slow one, nor a better class
    assert!(!gate.try_acquire());
    assert_eq!(gate.try_admit(T0), Err(Blocked::Slot));
    let second = waiter(&gate, spec(2, Interactive, T0));
    assert_eq!(first.poll(&gate, T0), GOT);
    gate.release();
    assert_eq!(second.woken(), 1);
    assert_eq!(second.poll(&gate, T0), GOT);
}

#[test]
fn one_release_wakes_one() {
    let gate = gate(1);
    assert!(gate.try_acquire());
    let all: Vec<_> = (0..10).map(|agent| waiter(&gate, spec(agent, Interactive, T0))).collect();
    gate.release();
    assert_eq!(all.iter().map(Hand::woken).sum::<usize>(), 1);
    assert_eq!(all[0].woken(), 1);
}

#[test]
fn growth_wakes_as_many_as_may_go() {
    let gate = gate(5);
    gate.set_cap(0);
    let all: Vec<_> = (0..5).map(|agent| waiter(&gate, spec(agent, Interactive, T0))).collect();
    gate.set_cap(3);
    assert_eq!(all.iter().map(Hand::woken).collect::<Vec<_>>(), [1, 1, 1, 0, 0]);
    // they claim in whatever order they are polled
    assert_eq!(all[2].poll(&gate, T0), GOT);
    all[4].waits(&gate, T0);
    assert_eq!(all[0].poll(&gate, T0), GOT);
}

#[test]
fn cancelled_waiters_pass_on() {
    let gate = gate(1);
    assert!(gate.try_acquire());
    let [first, second, third] = [0, 1, 2].map(|agent| waiter(&gate, spec(agent, Batch, T0)));
    gate.cancel(second.id);
    gate.release();
    gate.cancel(first.id);
    assert_eq!((second.woken(), third.woken()), (0, 1));
    gate.cancel(first.id);
    assert_eq!(third.poll(&gate, T0), GOT);
    assert_eq!(gate.waiting(), 0);
}

#[test]
fn a_called_waiter_that_stays_away_does_not_hold_the_slot() {
    let gate = gate(1);
    assert!(gate.try_acquire());
    let [asleep, next] = [0, 1].map(|agent| waiter(&gate, spec(agent, Interactive, T0)));
    gate.release();
    assert_eq!((asleep.woken(), next.woken()), (1, 0));
    // the call is dated by the first look at a clock
    next.waits(&gate, secs(1));
    next.waits(&gate, Time::from_nanos(1_999_999_999));
    assert_eq!(next.poll(&gate, secs(2)), GOT);
    // with nobody else to be passed, a call that does not wait gets through
    gate.release();
    assert_eq!(gate.try_admit(secs(4)), Ok(()));
    // it is first again when it comes back
    let last = waiter(&gate, spec(2, Interactive, secs(4)));
    asleep.waits(&gate, secs(5));
    gate.release();
    assert_eq!((asleep.woken(), last.woken()), (2, 0));
    assert_eq!(asleep.poll(&gate, secs(5)), GOT);
}

#[test]
fn an_absent_timekeeper_is_replaced() {
    let gate = gate(1);
    gate.with_pacer(|pacer| pacer.pause(secs(10)));
    let absent = waiter(&gate, spec(0, Interactive, T0));
    let next = waiter(&gate, spec(1, Interactive, T0));
    next.waits(&gate, secs(9));
    assert_eq!(next.poll(&gate, secs(11)), GOT);
    gate.cancel(absent.id);
    assert_eq!(gate.waiting(), 0);
}

#[test]
fn one_waiter_keeps_the_time_in_a_pause() {
    let gate = gate(2);
    gate.with_pacer(|pacer| pacer.pause(secs(3)));
    let id = gate.enqueue(spec(0, Interactive, T0)).unwrap();
    let first = Hand { id, count: Arc::default() };
    assert_eq!(first.poll(&gate, T0), told(secs(3)));
    let [second, third] = [1, 2].map(|agent| waiter(&gate, spec(agent, Interactive, T0)));
    second.waits(&gate, T0);
    assert_eq!(first.poll(&gate, secs(1)), told(secs(3)));
    assert_eq!(gate.read_pacer(|pacer| pacer.asked), 1, "asked once for all");
    // if it goes, the next takes over
    gate.cancel(first.id);
    assert_eq!(second.woken(), 1);
    assert_eq!(second.poll(&gate, secs(1)), told(secs(3)));
    assert_eq!(second.poll(&gate, secs(3)), GOT);
    assert_eq!(third.woken(), 1);
    assert_eq!(third.poll(&gate, secs(3)), GOT);
}

#[test]
fn a_paced_gate_hands_the_timer_on() {
    let gate = gate(9);
    gate.with_pacer(|pacer| pacer.spacing = Duration::from_secs(1));
    assert!(!gate.try_acquire());
    assert_eq!(gate.try_admit(T0), Ok(()));
    let first = waiter(&gate, spec(0, Interactive, T0));
    let second = waiter(&gate, spec(0, Interactive, T0));
    assert_eq!(first.poll(&gate, secs(1)), GOT);
    assert_eq!(second.woken(), 1);
    assert_eq!(second.poll(&gate, secs(1)), told(secs(2)));
    // a release changes nothing before that
    gate.release();
    assert_eq!(second.woken(), 1);
    // a change of the pacer does
    gate.with_pacer(|pacer| pacer.spacing = Duration::ZERO);
    assert_eq!(second.woken(), 2);
    assert_eq!(second.poll(&gate, secs(1)), GOT);
    assert!(gate.try_acquire());
}

#[test]
fn a_pacer_that_wants_a_slot_to_free_is_asked_then() {
    let gate = gate(9);
    gate.with_pacer(|pacer| pacer.inner = Some(1));
    assert_eq!(gate.try_admit(T0), Ok(()));
    let first = waiter(&gate, spec(0, Interactive, T0));
    let second = waiter(&gate, spec(1, Interactive, T0));
    first.waits(&gate, T0);
    assert_eq!(gate.read_pacer(|pacer| pacer.asked), 2);
    gate.release();
    assert_eq!((first.woken(), second.woken()), (1, 0));
    assert_eq!(first.poll(&gate, T0), GOT);
}

#[test]
fn a_changed_ceiling_asks_a_pacer_that_wants_a_slot() {
    let gate = gate(9);
    gate.with_pacer(|pacer| pacer.inner = Some(0));
    let first = waiter(&gate, spec(0, Interactive, T0));
    gate.set_cap(8);
    assert_eq!(first.woken(), 1);
    first.waits(&gate, T0);
    // what it said to one who left says nothing of what frees unseen
    gate.with_pacer(|pacer| pacer.inner = Some(1));
    assert_eq!(first.poll(&gate, T0), GOT);
    let second = waiter(&gate, spec(0, Interactive, T0));
    gate.cancel(second.id);
    gate.release();
    assert_eq!(gate.try_admit(T0), Ok(()));
}

#[test]
fn an_instant_that_has_come_is_no_reason_to_spin() {
    let gate = gate(1);
    gate.with_pacer(|pacer| pacer.late = true);
    let id = gate.enqueue(spec(0, Interactive, T0)).unwrap();
    let hand = Hand { id, count: Arc::default() };
    assert_eq!(hand.poll(&gate, secs(1)), told(Time::from_nanos(1_000_000_001)));
}

#[test]
fn lingering_slots_count_until_their_instant() {
    let gate = gate(2);
    assert!(gate.try_acquire() && gate.try_acquire());
    gate.release_at(secs(2));
    assert_eq!((gate.busy(), gate.lingering()), (2, 1));
    assert!(!gate.try_acquire());
    assert_eq!(gate.try_admit(secs(1)), Err(Blocked::Slot));
    assert_eq!(gate.try_admit(secs(2)), Ok(()));
    assert_eq!(gate.lingering(), 0);
    // a waiter is told the earliest instant, also if that comes after it
    let first = waiter(&gate, spec(0, Interactive, secs(2)));
    let second = waiter(&gate, spec(0, Interactive, secs(2)));
    gate.release_at(secs(9));
    assert_eq!((first.woken(), second.woken()), (1, 0));
    assert_eq!(first.poll(&gate, secs(2)), told(secs(9)));
    gate.release_at(secs(5));
    assert_eq!(first.woken(), 2);
    assert_eq!(first.poll(&gate, secs(2)), told(secs(5)));
    assert_eq!(first.poll(&gate, secs(5)), GOT);
    assert_eq!(second.woken(), 1, "the next keeps the time");
    assert_eq!(second.poll(&gate, secs(5)), told(secs(9)));
    assert_eq!(second.poll(&gate, secs(9)), GOT);
    // an instant that is over frees at once
    gate.release_at(secs(9));
    assert_eq!((gate.busy(), gate.lingering()), (1, 0));
}

#[test]
fn a_full_queue_refuses() {
    let config = QueueConfig { bound: 2, ..QueueConfig::default() };
    let gate = Gate::new(Trial::fixed(0), config);
    let first = gate.enqueue(spec(0, Batch, T0)).unwrap();
    gate.enqueue(spec(1, Batch, T0)).unwrap();
    assert_eq!(gate.enqueue(spec(2, Interactive, T0)), Err(Full));
    gate.cancel(first);
    assert!(gate.enqueue(spec(2, Interactive, T0)).is_ok());
}

/// The newcomers may be the only ones who bring a clock.
#[test]
fn a_full_queue_of_absent_waiters_calls_the_next() {
    let config = QueueConfig { bound: 2, ..QueueConfig::default() };
    let gate = Gate::new(Trial::fixed(1), config);
    assert!(gate.try_acquire());
    let [absent, next] = [0, 1].map(|agent| waiter(&gate, spec(agent, Interactive, T0)));
    gate.release();
    for at in 1..=2 {
        assert_eq!(gate.enqueue(spec(2, Interactive, secs(at))), Err(Full));
    }
    assert_eq!((absent.woken(), next.woken()), (1, 1));
}

#[test]
fn the_newest_waker_is_woken() {
    let gate = gate(1);
    assert!(gate.try_acquire());
    let mut hand = waiter(&gate, spec(0, Interactive, T0));
    let old = std::mem::take(&mut hand.count);
    hand.waits(&gate, T0);
    gate.release();
    assert_eq!((old.0.load(SeqCst), hand.woken()), (0, 1));
}

#[test]
fn one_task_in_two_gates() {
    let gates = [gate(1), gate(1)];
    assert!(gates.iter().all(Gate::try_acquire));
    let count = Arc::<Count>::default();
    let task = gates
        .each_ref()
        .map(|gate| Hand { id: gate.enqueue(spec(0, Interactive, T0)).unwrap(), count: count.clone() });
    (0..2).for_each(|i| task[i].waits(&gates[i], T0));
    let behind = waiter(&gates[1], spec(1, Interactive, T0));
    gates[0].release();
    gates[1].release();
    assert_eq!(count.0.load(SeqCst), 2);
    assert_eq!(task[0].poll(&gates[0], T0), GOT);
    gates[1].cancel(task[1].id);
    assert_eq!(behind.woken(), 1);
    assert_eq!(behind.poll(&gates[1], T0), GOT);
}

#[test]
fn tells_how_it_stands() {
    let gate = gate(1);
    assert!(gate.try_acquire());
    let first = waiter(&gate, spec(0, Batch, secs(1)));
    let second = waiter(&gate, spec(0, Interactive, secs(2)));
    assert_eq!((gate.waiting(), gate.busy(), gate.cap()), (2, 1, 1));
    assert_eq!(gate.oldest_wait(secs(4)), Some(Duration::from_secs(3)));
    assert_eq!((gate.position(first.id), gate.position(second.id)), (Some(1), Some(0)));
    gate.cancel(first.id);
    assert_eq!(gate.oldest_wait(secs(4)), Some(Duration::from_secs(2)));
    assert_eq!(gate.position(first.id), None);
}

#[test]
fn guards_give_back() {
    let gate = Arc::new(gate(1));
    let held = Permit::try_acquire(gate.clone()).unwrap();
    assert!(Permit::try_acquire(gate.clone()).is_err());
    let mut entry = Entry::enqueue(gate.clone(), spec(0, Interactive, T0)).unwrap();
    let dropped = Entry::enqueue(&*gate, spec(0, Interactive, T0)).unwrap();
    drop(dropped);
    assert_eq!(gate.waiting(), 1);
    let waker = StdWaker::noop();
    let mut cx = Context::from_waker(waker);
    assert!(matches!(entry.poll_claim(T0, &mut cx), Claimed::Wait { .. }));
    drop(held);
    let Claimed::Got((handle, ())) = entry.poll_claim(T0, &mut cx) else {
        panic!("not served");
    };
    let permit = Permit::new(handle);
    drop(entry);
    permit.release_at(secs(1));
    assert_eq!((gate.busy(), gate.waiting()), (1, 0));
    assert_eq!(gate.try_admit(secs(1)), Ok(()));
}

#[test]
#[should_panic = "polled after it was served or cancelled"]
fn a_served_waiter_is_not_polled() {
    let gate = gate(1);
    let id = gate.enqueue(spec(0, Batch, T0)).unwrap();
    let hand = Hand { id, count: Arc::default() };
    assert_eq!(hand.poll(&gate, T0), GOT);
    assert_eq!(hand.poll(&gate, T0), GOT);
}

/// Dropping or waking a waker may drop a task, whose drop may use the gate.
#[test]
fn wakers_are_used_and_dropped_outside_the_lock() {
    struct Reentrant(Arc<Gate<Trial>>);
    impl Wake for Reentrant {
        fn wake(self: Arc<Self>) {
            self.0.waiting();
        }
    }
    impl Drop for Reentrant {
        fn drop(&mut self) {
            self.0.waiting();
        }
    }
    let gate = Arc::new(gate(1));
    let fresh = || StdWaker::from(Arc::new(Reentrant(gate.clone())));
    assert!(gate.try_acquire());
    let poll = |id| gate.poll_claim(id, T0, &mut Context::from_waker(&fresh()));
    let [first, second] = [0, 1].map(|agent| gate.enqueue(spec(agent, Batch, T0)).unwrap());
    for id in [first, first, second] {
        assert_eq!(poll(id), Claimed::Wait { again_at: None });
    }
    gate.release();
    gate.cancel(first);
    assert_eq!(poll(second), GOT);
    let third = gate.enqueue(spec(0, Batch, T0)).unwrap();
    assert_eq!(poll(third), Claimed::Wait { again_at: None });
    gate.cancel(third);
}

#[test]
fn a_panic_of_the_pacer_leaves_a_working_gate() {
    let gate = gate(1);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        gate.with_pacer(|pacer| {
            pacer.cap = 2;
            panic!("in a pacer");
        })
    }));
    assert!(caught.is_err());
    assert_eq!(gate.try_admit(T0), Ok(()));
    assert!(gate.try_acquire());
}

/// Real threads: the ceiling holds while it moves, and everybody gets through.
#[test]
fn many_threads() {
    struct Unpark(thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let gate = Arc::new(gate(4));
    let inside = AtomicU32::new(0);
    thread::scope(|scope| {
        for agent in 0..6 {
            let (gate, inside) = (&*gate, &inside);
            scope.spawn(move || {
                let waker = StdWaker::from(Arc::new(Unpark(thread::current())));
                let mut cx = Context::from_waker(&waker);
                for round in 0..3000 {
                    if !gate.try_acquire() {
                        let class = [Interactive, Batch][round % 2];
                        let id = gate.enqueue(spec(agent, class, T0)).unwrap();
                        if round % 7 == 0 {
                            gate.cancel(id);
                            continue;
                        }
                        while gate.poll_claim(id, T0, &mut cx) != GOT {
                            thread::park();
                        }
                    }
                    assert!(inside.fetch_add(1, SeqCst) < 4);
                    if round % 3 == 0 {
                        thread::yield_now();
                    }
                    inside.fetch_sub(1, SeqCst);
                    gate.release();
                }
            });
        }
        for round in 0..1000 {
            gate.set_cap(round % 5);
            thread::yield_now();
        }
        gate.set_cap(2);
    });
    assert_eq!((gate.busy(), gate.waiting()), (0, 0));
}
