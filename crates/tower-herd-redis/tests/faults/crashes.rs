//! Processes that die, and processes that leave.

use crate::{
    herd::{Herd, MS, Worker, all, is_long, report, until},
    judge::Call,
    worker::{Command, Load, Policy},
};
use fastrand::Rng;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// For as long as it takes: who has a slot keeps it.
const FOREVER: u64 = 600_000;

/// A process with all slots, and another that waits for them.
async fn held_all(herd: &Herd, hold: u64, outage: Policy) -> (Worker, Worker) {
    let many = herd.plan.ceiling;
    let mut holder = herd.start("holder", |plan| {
        (plan.load, plan.outage) = (Load { callers: many, hold }, outage);
    });
    herd.full().await;
    let mut waiter = herd.start("waiter", |plan| plan.outage = outage);
    until("the other one has asked", async || waiter.status().await.exchanges > 2).await;
    // And what is safe of two was told.
    until("they know each other", async || holder.status().await.members == 2).await;
    sleep(herd.times.renewal() * 3).await;
    (holder, waiter)
}

// Row: a process is killed, and the provider drops its calls. It holds.
#[tokio::test]
async fn redisson_2045_solid_queue_546_the_slots_of_a_killed_process_are_back_within_the_ttl_and_a_renewal() {
    let herd = Herd::new(6).await;
    let (holder, waiter) = held_all(&herd, FOREVER, Policy::Stop).await;
    assert_eq!(herd.judge.now(|call| holder.owns(call)), 6);
    let killed = Instant::now();
    holder.kill().await;
    let back = herd.filled(killed, 6, |call| waiter.owns(call)).await;
    // Not before it: its last report was no older than a renewal.
    assert!(back - killed + herd.times.renewal() + MS(50) >= herd.times.ttl, "{:?}", back - killed);
    report("all slots after a kill", back - killed, herd.times.ttl + herd.times.renewal());
    // One that is killed while idle holds a few slots, too, and they come back the same way.
    let mut idle = herd.start("idle", |plan| plan.load.callers = 0);
    until("the idle one has joined", async || idle.status().await.members == 2).await;
    idle.kill().await;
    let killed = Instant::now();
    sleep(herd.times.ttl + herd.times.renewal()).await;
    herd.filled(killed, 6, |call| waiter.owns(call)).await;
    herd.holds(6, all);
}

// The price of `keep`: the safe share of who was killed is nobody's until the grace is over.
#[tokio::test]
async fn what_is_safe_is_not_back_before_the_grace_is_over() {
    let mut herd = Herd::new(12).await;
    herd.plan.grace = 4000;
    let (holder, waiter) = held_all(&herd, FOREVER, Policy::Keep(0.5)).await;
    let killed = Instant::now();
    holder.kill().await;
    // Half of an equal share of 6.
    let most = herd.filled(killed, 9, |call| waiter.owns(call)).await;
    report("all but the safe slots after a kill", most - killed, herd.times.ttl + herd.times.renewal());
    let back = herd.filled(killed, 12, |call| waiter.owns(call)).await;
    assert!(
        back - killed + herd.times.renewal() + MS(50) >= herd.times.ttl + MS(4000),
        "{:?}",
        back - killed
    );
    herd.holds(12, all);
}

/// A process with all slots is killed, and the provider works on at its calls: the calls of it, and when.
async fn orphaned(strict: bool) -> (Herd, Worker, Instant) {
    let mut herd = Herd::new(6).await;
    herd.judge.works_on(true);
    let hold = u64::try_from(herd.times.ttl.as_millis()).unwrap() * 8 / 5;
    herd.plan.strict = strict.then_some(hold + 500);
    let (holder, waiter) = held_all(&herd, hold, Policy::Stop).await;
    // When its calls have just begun.
    let seen = herd.judge.began(herd.began, Instant::now(), |call| holder.owns(call));
    until("new calls", async || {
        herd.judge.began(herd.began, Instant::now(), |call| holder.owns(call)) > seen
            && herd.judge.now(|call| holder.owns(call)) > 0
    })
    .await;
    let killed = Instant::now();
    holder.kill().await;
    (herd, waiter, killed)
}

fn of(name: &str) -> impl Fn(&Call) -> bool + '_ {
    move |call| *call.worker == *name
}

// Row: a process is killed, and the provider works on at its calls. Exceeded by those calls, until they end; strict: it
// holds.
#[tokio::test]
async fn calls_of_a_killed_process_on_which_the_provider_works_on() {
    let (default, strict) = tokio::join!(orphaned(false), orphaned(true));
    for (herd, waiter, killed) in [&default, &strict] {
        herd.filled(*killed, 6, |call| waiter.owns(call)).await;
    }
    let (herd, _waiter, killed) = default;
    let orphans = herd.judge.most(killed, of("holder"));
    assert!(orphans >= 1 && herd.judge.began(killed + MS(50), Instant::now(), of("holder")) == 0);
    let most = herd.judge.most(herd.began, all);
    eprintln!("default: {most} in flight of 6, {orphans} of a dead process");
    assert!(most > 6, "nothing was exceeded: this test shows nothing");
    assert!(most <= 6 + orphans, "{most} in flight, of 6 and {orphans} of a dead process");
    herd.holds(6, |call| {
        !of("holder")(call) || call.began <= killed && call.ended.is_some_and(|at| at <= killed)
    });
    let (herd, _waiter, killed) = strict;
    assert!(herd.judge.most(killed, of("holder")) >= 1);
    herd.holds(6, all);
}

// PrefectHQ/prefect#17415, redisson/redisson#4100, #6302, marcosbarbero/spring-cloud-zuul-ratelimit#162,
// alisaifee/limits#14: wherever a process is killed, nothing of it stays, neither slots nor keys.
#[tokio::test]
async fn prefect_17415_redisson_4100_6302_after_random_kills_all_slots_are_back_and_nothing_is_left_behind() {
    let seed = std::env::var("TOWER_HERD_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(17_415);
    eprintln!("TOWER_HERD_SEED={seed}");
    let mut rng = Rng::with_seed(seed);
    let herd = Herd::new(8).await;
    let mut workers = herd.start_all(&["a", "b", "c"]);
    herd.full().await;
    let kills = if is_long() { 60 } else { 8 };
    for number in 0..kills {
        sleep(MS(rng.u64(50..600))).await;
        workers.swap_remove(rng.usize(..workers.len())).kill().await;
        workers.push(herd.start(&format!("{number}"), |plan| plan.load.hold = rng.u64(20..400)));
    }
    let last = Instant::now();
    let within = herd.times.ttl + herd.times.renewal();
    sleep(within).await;
    herd.full_within(last, within, "full use after random kills").await;
    herd.holds(8, all);
    // One key, with a field for the state and one for each that lives.
    until("the book holds the living only", async || {
        herd.redis.cli(&["HLEN", "herd:v1:{llm}"]) == (workers.len() + 1).to_string()
    })
    .await;
    assert_eq!(herd.redis.cli(&["DBSIZE"]), "1");
    assert_eq!(herd.redis.cli(&["TTL", "herd:v1:{llm}"]), "-1");
}

// BerriAI/litellm#20256: who leaves, and who loses its runtime, gives everything back, and does not take a ttl for it.
#[tokio::test]
async fn litellm_20256_who_leaves_and_whose_runtime_ends_gives_all_slots_back() {
    for command in [Command::Leave, Command::EndRuntime] {
        let herd = Herd::new(6).await;
        let (mut holder, mut waiter) = held_all(&herd, 400, Policy::Stop).await;
        herd.full().await;
        holder.tell(command).await;
        let told = Instant::now();
        if let Command::Leave = command {
            let left = holder.hear().await;
            assert_eq!(left.slots, 0, "{left:?}");
        }
        let full = herd.filled(told, 6, |call| waiter.owns(call)).await;
        report(&format!("slots after {command:?}"), full - told, herd.times.ttl + herd.times.renewal());
        until("one is left", async || waiter.status().await.members == 1).await;
        assert_eq!(herd.judge.began(told + MS(500), Instant::now(), of("holder")), 0, "{command:?}");
        herd.holds(6, all);
    }
}

// inngest/inngest#3733, #3814: renewal and goodbye of a lease that has run out change nothing for those who have its
// slots now.
#[tokio::test]
async fn inngest_3733_3814_renewal_and_goodbye_after_the_slots_went_to_others_change_nothing() {
    let herd = Herd::new(6).await;
    let mut stopped = herd.start_all(&["a", "b"]);
    herd.full().await;
    let mut other = herd.start("other", |_| {});
    until("the other one has joined", async || other.status().await.members == 3).await;
    for worker in &stopped {
        worker.stop();
    }
    let since = Instant::now();
    sleep(herd.times.ttl).await;
    herd.filled(since, 6, |call| other.owns(call)).await;
    stopped.iter().for_each(Worker::go_on);
    let went_on = Instant::now();
    // One renews, the other one says goodbye.
    let left = stopped.pop().unwrap().ask(Command::Leave).await;
    assert_eq!(left.slots, 0);
    until("who renews is back", async || other.status().await.members == 2).await;
    herd.filled(went_on, 1, of("a")).await;
    sleep(Duration::from_secs(1)).await;
    herd.full().await;
    herd.holds(6, all);
}
