//! Every interleaving (with few preemptions) of small scenes, and the mistakes
//! that these scenes would show.
//!
//! ```sh
//! RUSTFLAGS="--cfg loom" cargo test --release --lib loom
//! ```
//!
//! A lost wake-up is a deadlock here, which loom reports.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use loom::{
    future::block_on,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
    thread,
};

use super::{
    sync::{Arc, Fault, VARIABLE},
    *,
};

/// Fixed ceiling; a pause; counts who was admitted by it.
struct Fixed {
    cap: u32,
    paused: Option<Time>,
    slow: bool,
}

impl Pacer for Fixed {
    type Admitted = ();

    fn admit(&mut self, now: Time, busy: u32, _: usize) -> Result<(), Blocked> {
        assert!(busy < self.cap);
        match self.paused {
            Some(until) if now < until => return Err(Blocked::Until(until)),
            _ => self.paused = None,
        }
        Ok(())
    }

    fn published(&self) -> Published {
        Published { cap: self.cap, fast: self.cap, slow: self.slow || self.paused.is_some() }
    }
}

type G = Arc<Gate<Fixed>>;

fn gate(cap: u32) -> G {
    let pacer = Fixed { cap, paused: None, slow: false };
    Arc::new(Gate::new(pacer, QueueConfig::default()))
}

/// A task's wait in one gate. Its timer fires when it is armed.
struct Acquire {
    gate: G,
    now: Time,
    entry: Option<Entry<G>>,
}

fn acquire(gate: &G) -> Acquire {
    Acquire { gate: gate.clone(), now: Time::ZERO, entry: None }
}

impl Future for Acquire {
    type Output = Permit<G>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Permit<G>> {
        let this = &mut *self;
        if this.entry.is_none() {
            if this.gate.try_acquire() {
                return Poll::Ready(Permit::new(this.gate.clone()));
            }
            let waiter = Waiter { agent: None, class: Class::Interactive, now: this.now };
            this.entry = Entry::enqueue(this.gate.clone(), waiter).ok();
        }
        loop {
            let entry = this.entry.as_mut().unwrap();
            match entry.poll_claim(this.now, cx) {
                Claimed::Got((handle, ())) => return Poll::Ready(Permit::new(handle)),
                Claimed::Wait { again_at: None } => return Poll::Pending,
                Claimed::Wait { again_at: Some(instant) } => this.now = this.now.max(instant),
            }
        }
    }
}

/// One poll.
fn once<T>(future: &mut (impl Future<Output = T> + Unpin)) -> Option<T> {
    block_on(std::future::poll_fn(|cx| {
        Poll::Ready(match Pin::new(&mut *future).poll(cx) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        })
    }))
}

fn model(preemptions: usize, scene: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(scene);
}

fn all_out(gate: &G) {
    assert_eq!(gate.busy(), 0);
    assert_eq!(gate.waiting(), 0);
    assert!(gate.try_acquire(), "the flags are clear again");
}

/// Tasks that want the one slot, each alone in it.
fn contend(others: usize) {
    let gate = gate(1);
    let inside = Arc::new(AtomicUsize::new(0));
    let task = |gate: G, inside: Arc<AtomicUsize>| {
        let permit = block_on(acquire(&gate));
        assert_eq!(inside.fetch_add(1, SeqCst), 0);
        inside.fetch_sub(1, SeqCst);
        drop(permit);
    };
    let spawned: Vec<_> = (0..others)
        .map(|_| {
            let (gate, inside) = (gate.clone(), inside.clone());
            thread::spawn(move || task(gate, inside))
        })
        .collect();
    task(gate.clone(), inside);
    for thread in spawned {
        thread.join().unwrap();
    }
    all_out(&gate);
}

#[test]
fn loom_two_tasks_one_slot() {
    model(8, || contend(1));
}

#[test]
fn loom_three_tasks_one_slot() {
    model(3, || contend(2));
}

/// A head that is polled once and then dropped, called or not, races a release
/// and a second waiter.
fn cancel_head() {
    let gate = gate(1);
    assert!(gate.try_acquire());
    let mut head = acquire(&gate);
    assert!(once(&mut head).is_none());
    let dropping = thread::spawn(move || drop(head));
    let second = gate.clone();
    let second = thread::spawn(move || drop(block_on(acquire(&second))));
    gate.release();
    dropping.join().unwrap();
    second.join().unwrap();
    all_out(&gate);
}

#[test]
fn loom_cancelled_head_passes_on() {
    model(4, cancel_head);
}

/// The head was woken for certain before it is dropped.
fn cancel_called() {
    let gate = gate(1);
    assert!(gate.try_acquire());
    let mut head = acquire(&gate);
    assert!(once(&mut head).is_none());
    let second = gate.clone();
    let second = thread::spawn(move || drop(block_on(acquire(&second))));
    gate.release();
    drop(head);
    second.join().unwrap();
    all_out(&gate);
}

#[test]
fn loom_cancelled_called_waiter_passes_on() {
    model(8, cancel_called);
}

fn shrink_and_grow() {
    let gate = gate(2);
    assert!(gate.try_acquire() && gate.try_acquire());
    let steering = gate.clone();
    let steering = thread::spawn(move || {
        let shrunk = steering.set_cap(0);
        assert_eq!(shrunk.cap, 0);
        let busy = steering.busy();
        assert!(busy <= shrunk.busy, "nobody enters after a shrink");
        steering.set_cap(1);
    });
    let waiter = gate.clone();
    let waiter = thread::spawn(move || drop(block_on(acquire(&waiter))));
    gate.release();
    gate.release();
    steering.join().unwrap();
    waiter.join().unwrap();
    all_out(&gate);
}

#[test]
fn loom_shrink_and_grow_while_out() {
    model(3, shrink_and_grow);
}

/// The bound falls with the slots that are given back: however that meets a call that wants to enter, what
/// this process may have in flight is never more than what it was said to hold.
fn shed_while_in_use() {
    let gate = gate(2);
    assert!(gate.try_acquire() && gate.try_acquire());
    let others = Arc::new(AtomicUsize::new(0));
    let (leaving, given) = (gate.clone(), others.clone());
    let leaving = thread::spawn(move || {
        if leaving.release() {
            given.fetch_add(1, SeqCst);
        }
        // Somebody new: only where the bound has not fallen yet.
        if leaving.try_admit(Time::ZERO).is_ok() && leaving.release() {
            given.fetch_add(1, SeqCst);
        }
    });
    let held = gate.bind(|_, here, _| Bound { cap: here.cap, shed: Some(0) });
    let claimed = held.cap.max(held.busy);
    assert!(gate.busy() <= claimed, "more than was told");
    if gate.release() {
        others.fetch_add(1, SeqCst);
    }
    leaving.join().unwrap();
    let (here, _) = gate.bound();
    assert_eq!((here.cap, here.busy), (0, 0), "all went back");
    // Whoever saw the bound fall tells the fleet; that it was told of none would leave others waiting.
    assert!(others.load(SeqCst) >= 1 || claimed == 0, "nobody told");
    gate.set_cap(2);
    all_out(&gate);
}

#[test]
fn loom_bound_falls_with_the_calls() {
    model(3, shed_while_in_use);
}

/// After the flag was raised nobody takes the fast path, and nobody sleeps on
/// when it falls.
fn toggle_slow() {
    let gate = gate(1);
    let raised = Arc::new(AtomicUsize::new(0));
    let (other, told) = (gate.clone(), raised.clone());
    let task = thread::spawn(move || {
        let before = told.load(SeqCst);
        if other.try_acquire() {
            let after = told.load(SeqCst);
            assert!(before == 0 || after == 0, "passed the pacer");
            other.release();
        }
        drop(block_on(acquire(&other)));
    });
    gate.with_pacer(|pacer| pacer.slow = true);
    raised.store(1, SeqCst);
    let permit = block_on(acquire(&gate));
    drop(permit);
    raised.store(0, SeqCst);
    gate.with_pacer(|pacer| pacer.slow = false);
    task.join().unwrap();
    all_out(&gate);
}

#[test]
fn loom_slow_flag_toggled() {
    model(3, toggle_slow);
}

/// A pause is set and lifted around a waiter whose timer never fires: only the
/// change of the pacer can wake it.
fn lift_pause() {
    let gate = gate(1);
    gate.with_pacer(|pacer| pacer.paused = Some(Time::MAX));
    let waiter = gate.clone();
    let waiter = thread::spawn(move || {
        let spec = Waiter { agent: None, class: Class::Interactive, now: Time::ZERO };
        let mut entry = Entry::enqueue(waiter, spec).unwrap();
        let claim = std::future::poll_fn(|cx| match entry.poll_claim(Time::ZERO, cx) {
            Claimed::Got((handle, ())) => Poll::Ready(Permit::new(handle)),
            Claimed::Wait { .. } => Poll::Pending,
        });
        drop(block_on(claim));
    });
    gate.with_pacer(|pacer| pacer.paused = None);
    waiter.join().unwrap();
    all_out(&gate);
}

#[test]
fn loom_pause_lifted() {
    model(8, lift_pause);
}

/// Two waiters in a pause: one keeps the time, and calls the other.
#[test]
fn loom_pause_ends_by_timer() {
    model(2, || {
        let gate = gate(2);
        let end = Time::ZERO.saturating_add(Duration::from_secs(1));
        gate.with_pacer(|pacer| pacer.paused = Some(end));
        let other = gate.clone();
        let other = thread::spawn(move || drop(block_on(acquire(&other))));
        drop(block_on(acquire(&gate)));
        other.join().unwrap();
        all_out(&gate);
    });
}

/// A slot is left to linger while somebody waits for it.
#[test]
fn loom_lingering_slot_is_claimed() {
    model(3, || {
        let gate = gate(1);
        assert!(gate.try_acquire());
        let permit = Permit::new(gate.clone());
        let waiter = gate.clone();
        let waiter = thread::spawn(move || drop(block_on(acquire(&waiter))));
        permit.release_at(Time::from_nanos(5));
        waiter.join().unwrap();
        all_out(&gate);
    });
}

/// One task waits in two gates with one waker and takes the first that serves
/// it; a waiter behind it in the other must not starve.
fn two_gates() {
    let gates = [gate(1), gate(1)];
    assert!(gates[0].try_acquire() && gates[1].try_acquire());
    let mut places = gates.each_ref().map(acquire);
    let behind = gates[1].clone();
    assert!(once(&mut places[1]).is_none());
    let behind = thread::spawn(move || drop(block_on(acquire(&behind))));
    let releasing = gates.clone();
    let releasing = thread::spawn(move || {
        releasing.iter().for_each(|gate| {
            gate.release();
        });
    });
    let served = block_on(std::future::poll_fn(|cx| {
        for place in &mut places {
            if let Poll::Ready(permit) = Pin::new(place).poll(cx) {
                return Poll::Ready(permit);
            }
        }
        Poll::Pending
    }));
    drop(places);
    drop(served);
    behind.join().unwrap();
    releasing.join().unwrap();
    gates.iter().for_each(all_out);
}

#[test]
fn loom_waiter_in_two_gates() {
    model(2, two_gates);
}

/// `try_admit` asks the pacer under a flag that it sets for a moment: a release
/// or a newcomer in that moment loses nothing.
#[test]
fn loom_try_admit_races() {
    model(3, || {
        let gate = gate(1);
        gate.with_pacer(|pacer| pacer.slow = true);
        let other = gate.clone();
        let other = thread::spawn(move || {
            if other.try_admit(Time::ZERO).is_ok() {
                other.release();
            }
        });
        let waiter = gate.clone();
        let waiter = thread::spawn(move || drop(block_on(acquire(&waiter))));
        gate.with_pacer(|pacer| pacer.slow = false);
        other.join().unwrap();
        waiter.join().unwrap();
        all_out(&gate);
    });
}

/// The fast path and the pacer compete for one slot: whoever was told yes is
/// alone in it.
#[test]
fn loom_fast_and_slow_admission_share_the_ceiling() {
    model(4, || {
        let gate = gate(1);
        let inside = Arc::new(AtomicUsize::new(0));
        let (other, others) = (gate.clone(), inside.clone());
        let enter = |gate: &G, inside: &AtomicUsize| {
            assert_eq!(inside.fetch_add(1, SeqCst), 0);
            inside.fetch_sub(1, SeqCst);
            gate.release();
        };
        let task = thread::spawn(move || {
            if other.try_acquire() {
                enter(&other, &others);
            }
        });
        if gate.try_admit(Time::ZERO).is_ok() {
            enter(&gate, &inside);
        }
        task.join().unwrap();
        all_out(&gate);
    });
}

/// The waiter with the timer goes away in a pause: the one behind it gets it.
#[test]
fn loom_cancelled_timekeeper_passes_on() {
    model(3, || {
        let gate = gate(1);
        let end = Time::ZERO.saturating_add(Duration::from_secs(1));
        gate.with_pacer(|pacer| pacer.paused = Some(end));
        let waiter = Waiter { agent: None, class: Class::Interactive, now: Time::ZERO };
        let mut keeper = Entry::enqueue(gate.clone(), waiter).unwrap();
        let again_at = Some(end);
        let told = block_on(std::future::poll_fn(|cx| {
            Poll::Ready(matches!(
                keeper.poll_claim(Time::ZERO, cx),
                Claimed::Wait { again_at: at } if at == again_at
            ))
        }));
        assert!(told);
        let behind = gate.clone();
        let behind = thread::spawn(move || drop(block_on(acquire(&behind))));
        drop(keeper);
        behind.join().unwrap();
        all_out(&gate);
    });
}

/// The cells that calls write inside their slots are seen by the next: the word
/// orders them, not only counts them.
#[test]
fn loom_slot_orders_memory() {
    model(4, || {
        let gate = gate(1);
        let cell = Arc::new(AtomicU64::new(0));
        let (other, seen) = (gate.clone(), cell.clone());
        let bump = |cell: &AtomicU64| {
            let value = cell.load(std::sync::atomic::Ordering::Relaxed);
            cell.store(value + 1, std::sync::atomic::Ordering::Relaxed);
        };
        let task = thread::spawn(move || {
            let _permit = block_on(acquire(&other));
            bump(&seen);
        });
        {
            let _permit = block_on(acquire(&gate));
            bump(&cell);
        }
        task.join().unwrap();
        assert_eq!(cell.load(SeqCst), 2);
    });
}

/// Runs one of the models above, in a process of its own, with a mistake in the
/// gate. (A model that fails unwinds through guards that use it again, which
/// `should_panic` does not survive.)
fn catches(model: &str, mistake: Fault, by: &str) {
    let model = format!("{}::{model}", module_path!().split_once("::").unwrap().1);
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &model])
        .env(VARIABLE, format!("{mistake:?}"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("running 1 test"), "no such model: {said}");
    assert!(!output.status.success(), "{mistake:?} was not noticed");
    assert!(said.contains(by), "{mistake:?} failed for another reason: {said}");
}

#[test]
fn loom_catches_no_waiting_flag() {
    catches("loom_two_tasks_one_slot", Fault::NoWaitingFlag, "deadlock");
}

#[test]
fn loom_catches_early_look() {
    catches("loom_two_tasks_one_slot", Fault::EarlyLook, "deadlock");
}

#[test]
fn loom_catches_silent_cancel() {
    let model = "loom_cancelled_called_waiter_passes_on";
    catches(model, Fault::SilentCancel, "deadlock");
    catches("loom_waiter_in_two_gates", Fault::SilentCancel, "deadlock");
}

#[test]
fn loom_catches_silent_change() {
    let model = "loom_shrink_and_grow_while_out";
    catches(model, Fault::SilentChange, "deadlock");
    catches("loom_pause_lifted", Fault::SilentChange, "deadlock");
}

#[test]
fn loom_catches_asking_once() {
    let model = "loom_shrink_and_grow_while_out";
    catches(model, Fault::AskOnce, "deadlock");
}

#[test]
fn loom_catches_no_slow_flag() {
    catches("loom_slow_flag_toggled", Fault::NoSlowFlag, "passed the pacer");
}
