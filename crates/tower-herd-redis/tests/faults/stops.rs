//! Processes that stand still: stopped by a signal, or with a runtime that does nothing.

use crate::{
    herd::{Herd, MS, Worker, all, until},
    judge::Call,
    worker::{Command, Load},
};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// One of three is stopped for so long, with calls in flight that take `hold`: the most in flight of all, of those that
/// it did not have in flight when it was stopped, and how many those were.
async fn stopped(time: Duration, hold: Duration, strict: Option<Duration>) -> (usize, usize, usize) {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap();
    let mut herd = Herd::new(6).await;
    herd.plan.strict = strict.map(millis);
    herd.plan.load.hold = millis(hold);
    let first = herd.start("first", |_| {});
    herd.full().await;
    // They are short of slots all the time, and with calls of their own they see each slot that is free.
    let load = Load { callers: 6, hold: 300 };
    let mut others: Vec<Worker> =
        ["b", "c"].iter().map(|name| herd.start(name, |plan| plan.load = load)).collect();
    for other in &mut others {
        until("the others have asked", async || other.status().await.exchanges > 2).await;
    }
    let seen = herd.judge.began(herd.began, Instant::now(), |call| first.owns(call));
    until("it has calls that have just begun", async || {
        herd.judge.began(herd.began, Instant::now(), |call| first.owns(call)) > seen
    })
    .await;
    first.stop();
    let at = Instant::now();
    let old = |call: &Call| first.owns(call) && call.began <= at && call.ended.is_none_or(|ended| ended > at);
    let calls = herd.judge.now(old);
    sleep(time).await;
    // Answers that waited for it come late, and its own reports, too.
    let went_on = Instant::now();
    first.go_on();
    sleep(herd.times.beyond().max(hold)).await;
    herd.filled(went_on, 6, all).await;
    assert_eq!(herd.judge.began(at + MS(50), went_on, |call| first.owns(call)), 0, "it was stopped");
    (herd.judge.most(herd.began, all), herd.judge.most(herd.began, |call| !old(call)), calls)
}

// Row: a process is stopped for longer than the ttl, with calls in flight. Exceeded by its calls in flight, until they
// end; strict: it holds. Stopped for less than that, it holds anyway.
// d34ndev/sidekiq-limit_fetch#107: its own renewal is late, and that of the others comes first.
#[tokio::test]
async fn sidekiq_limit_fetch_107_stopped_for_longer_than_the_ttl() {
    let ttl = crate::herd::Times::get().ttl;
    let (hold, longest) = (ttl * 8 / 5, ttl * 9 / 5);
    let (default, strict, strict_and_long) = tokio::join!(
        stopped(ttl * 3 / 2, hold, None),
        stopped(ttl * 3 / 2, hold, Some(longest)),
        stopped(ttl + longest + MS(500), hold, Some(longest)),
    );
    let (most, without, calls) = default;
    eprintln!("default: {most} in flight of 6, {calls} of who was stopped");
    assert!(without <= 6, "{without} in flight besides those of who was stopped");
    assert!(most > 6, "nothing was exceeded: this test shows nothing");
    assert!(most <= 6 + calls, "{most} in flight, of 6 and {calls}");
    assert!(strict.0 <= 6 && strict.2 > 0, "{strict:?}");
    assert!(strict_and_long.0 <= 6 && strict_and_long.2 > 0, "{strict_and_long:?}");
}

#[tokio::test]
async fn stopped_for_a_part_of_the_ttl() {
    let ttl = crate::herd::Times::get().ttl;
    let hold = ttl * 8 / 5;
    let (half, most) = tokio::join!(stopped(ttl / 2, hold, None), stopped(ttl * 9 / 10, hold, None));
    assert!(half.0 <= 6, "{half:?}");
    // With the time since its last renewal it may be longer than the ttl.
    assert!(most.1 <= 6 && most.0 <= 6 + most.2, "{most:?}");
}

// PrefectHQ/prefect#21925: the renewal has a thread of its own. A runtime that is blocked for longer than the ttl, with
// calls in flight that are longer still, loses no lease: those calls are counted all the time.
#[tokio::test]
async fn prefect_21925_a_blocked_runtime_keeps_its_lease() {
    let herd = Herd::new(6).await;
    let block = u64::try_from(herd.times.beyond().as_millis()).unwrap();
    let mut blocked = herd.start("blocked", |plan| plan.load.hold = block + 2000);
    herd.full().await;
    let mut other = herd.start("other", |_| {});
    until("the other one waits", async || other.status().await.exchanges > 2).await;
    let before = blocked.status().await;
    blocked.load(6, 300).await;
    let began = Instant::now();
    let after = blocked.ask(Command::Block(block)).await;
    assert!(began.elapsed() >= MS(block));
    let renewals = after.exchanges - before.exchanges;
    eprintln!("{renewals} exchanges while the runtime was blocked");
    assert!(renewals >= block / u64::try_from(herd.times.renewal().as_millis()).unwrap() / 4, "{renewals}");
    assert_eq!((after.lost, after.state.as_str()), (0, "Held"), "{after:?}");
    herd.filled(began, 1, |call| other.owns(call)).await;
    herd.holds(6, all);
}

// llm-d/llm-d-async#336, sidekiq/sidekiq#4090: calls that are longer than the ttl are counted to their end.
#[tokio::test]
async fn llm_d_async_336_sidekiq_4090_calls_longer_than_the_ttl_are_counted_to_their_end() {
    let mut herd = Herd::new(6).await;
    herd.plan.load.hold = u64::try_from(herd.times.beyond().as_millis()).unwrap();
    let _workers = herd.start_all(&["a", "b", "c"]);
    herd.full().await;
    sleep(herd.times.beyond() * 3).await;
    herd.holds(6, all);
    assert!(herd.judge.calls().len() >= 18, "{}", herd.judge.calls().len());
}
