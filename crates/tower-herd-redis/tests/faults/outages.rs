//! A store that is slow or gone, for all.

use crate::{
    herd::{Herd, MS, Worker, all, is_long, report, until},
    judge::Call,
    worker::Policy,
};
use tokio::time::{Instant, sleep};

/// Everything that ended, in all workers: replies and typed refusals, and nothing else.
async fn ends(workers: &mut [Worker], allowed: &[&str]) {
    for worker in workers {
        let status = worker.status().await;
        assert!(status.ends.keys().all(|end| allowed.contains(&end.as_str())), "{status:?}");
        let errors = ["timeout", "unreachable", "unavailable"];
        assert!(status.errors.keys().all(|kind| errors.contains(&kind.as_str())), "{status:?}");
        assert_eq!(status.overshoot, 0, "{status:?}");
    }
}

/// Leases that all of them lost so far.
async fn lost(workers: &mut [Worker]) -> u64 {
    let mut sum = 0;
    for worker in workers {
        sum += worker.status().await.lost;
    }
    sum
}

// Rows: a slow store, an outage for all. It holds. Shorter than a lease is used, nobody notices.
#[tokio::test]
async fn a_store_that_stops_for_a_while_and_a_paused_one() {
    let herd = Herd::new(6).await;
    let mut workers = herd.start_all(&["a", "b", "c"]);
    herd.full().await;
    let long = if is_long() { MS(5000) } else { MS(1000) };
    for (time, stopped) in [(MS(1000), true), (long, true), (long, false)] {
        let from = Instant::now();
        if stopped {
            herd.redis.stop();
            sleep(time).await;
            herd.redis.go_on();
        } else {
            let millis = time.as_millis().to_string();
            assert_eq!(herd.redis.cli(&["CLIENT", "PAUSE", &millis, "ALL"]), "OK");
            sleep(time).await;
        }
        assert!(herd.judge.began(from + time / 2, Instant::now(), all) > 0, "calls go on");
        let back = Instant::now();
        sleep(herd.times.renewal()).await;
        herd.full_within(back, herd.times.ttl + MS(2000), "full use after a pause of the store").await;
    }
    herd.holds(6, all);
    ends(&mut workers, &["200"]).await;
}

/// The store is away for two ttl, with this policy: what was in flight then at most, once leases had run out and calls of
/// before had ended; and how many calls began.
async fn outage(policy: Policy, ceiling: u32) -> (Herd, usize, usize) {
    let mut herd = Herd::new(ceiling).await;
    (herd.plan.outage, herd.plan.patience) = (policy, 400);
    let mut workers = herd.start_all(&["a", "b", "c"]);
    herd.full().await;
    until("all have joined", async || workers[0].status().await.members == 3).await;
    // What is safe was told to each of the three.
    sleep(herd.times.renewal() * 3).await;
    herd.redis.stop();
    let from = Instant::now();
    sleep(herd.times.ttl * 2).await;
    for worker in &mut workers {
        let status = worker.status().await;
        assert_eq!(status.state, "Lost", "{status:?}");
    }
    let to = Instant::now();
    herd.redis.go_on();
    // By then leases have run out, and calls of before have ended.
    let lapsed = from + herd.times.used() + MS(300) + MS(300);
    let most = herd.judge.most(lapsed, |call| call.began < to);
    let began = herd.judge.began(lapsed, to, all);
    // Whoever wants a slot while there is none is told so, and not that the provider failed.
    let (ceiling, within) = (ceiling as usize, herd.times.ttl + MS(2000));
    let full = herd.filled(to + MS(100), ceiling, all).await;
    report("full use after an outage", full - to, within);
    for worker in &mut workers {
        until("all are back", async || worker.status().await.state == "Held").await;
    }
    herd.full().await;
    ends(&mut workers, &["200", "no_slot"]).await;
    let mut refused = 0;
    for worker in &mut workers {
        let status = worker.status().await;
        assert!(status.lost >= 1 && !status.errors.is_empty(), "{status:?}");
        refused += status.ends.get("no_slot").copied().unwrap_or_default();
    }
    assert!(refused > 0, "callers were refused");
    (herd, most, began)
}

// noosphere#242, aegis-latent-core#67, edictum-console#7: without a store there is a limit all the same, by the policy.
// firecrawl/firecrawl#3728: what callers see is a refusal of ours, never a 429, and calls go on until leases run out.
#[tokio::test]
async fn noosphere_242_aegis_latent_core_67_edictum_console_7_firecrawl_3728_what_goes_on_without_a_store() {
    let (stop, keep, small, local) = tokio::join!(
        outage(Policy::Stop, 6),
        outage(Policy::Keep(0.5), 12),
        // Under twice the members: none of them could keep a whole slot.
        outage(Policy::Keep(0.5), 5),
        outage(Policy::Local(1), 6),
    );
    for (herd, most, began) in [&stop, &small] {
        assert_eq!((*most, *began), (0, 0));
        herd.holds(herd.plan.ceiling as usize, all);
    }
    let (herd, most, began) = keep;
    assert!(most <= 6 && began > 0, "{most} in flight in the outage, of 3 times 2");
    herd.holds(12, all);
    let (herd, most, began) = local;
    assert!(most <= 3 && began > 0, "{most} in flight in the outage, of 3 times 1");
    herd.holds(6, all);
}

// Policy `local`: n times the processes, which may be more than the ceiling, and never more than that.
#[tokio::test]
async fn litellm_35533_local_is_n_times_the_processes() {
    let (herd, most, began) = outage(Policy::Local(3), 6).await;
    eprintln!("{most} in flight in the outage");
    assert!(most <= 9 && most > 6 && began > 0, "{most} in flight, of 3 times 3");
    let before = herd.judge.calls().iter().map(|call| call.began).min().unwrap();
    assert!(herd.judge.most(before, all) <= 9);
}

// Scripts are forgotten between calls: the next one loads its own again.
#[tokio::test]
async fn scripts_are_flushed_all_the_time() {
    let herd = Herd::new(6).await;
    let mut workers = herd.start_all(&["a", "b", "c"]);
    herd.full().await;
    let before = lost(&mut workers).await;
    let from = Instant::now();
    while from.elapsed() < herd.times.ttl * 2 {
        assert_eq!(herd.redis.cli(&["SCRIPT", "FLUSH"]), "OK");
        sleep(MS(40)).await;
    }
    herd.full().await;
    herd.holds(6, all);
    ends(&mut workers, &["200"]).await;
    assert_eq!(lost(&mut workers).await, before);
}

// redis/redis#8623, #6565: a full store is an outage like any other, and is told as one.
#[tokio::test]
async fn redis_8623_6565_out_of_memory_is_an_outage() {
    let herd = Herd::new(6).await;
    let mut workers = herd.start_all(&["a", "b"]);
    herd.full().await;
    assert_eq!(herd.redis.cli(&["CONFIG", "SET", "maxmemory", "1"]), "OK");
    let from = Instant::now();
    sleep(herd.times.beyond()).await;
    let to = Instant::now();
    let late = from + herd.times.used() + MS(300) + herd.times.answer_within;
    assert_eq!(herd.judge.began(late, to, all), 0);
    for worker in &mut workers {
        let status = worker.status().await;
        assert_eq!(status.state, "Lost", "{status:?}");
        assert!(status.errors.contains_key("unavailable"), "{status:?}");
    }
    assert_eq!(herd.redis.cli(&["CONFIG", "SET", "maxmemory", "0"]), "OK");
    herd.filled(to, 6, all).await;
    herd.holds(6, all);
    ends(&mut workers, &["200"]).await;
}

// A process that starts in an outage has nothing, and says so; it begins when the store is back.
#[tokio::test]
async fn who_starts_in_an_outage_waits_for_the_store() {
    let herd = Herd::new(6).await;
    herd.redis.stop();
    let mut worker = herd.start("new", |plan| plan.patience = 200);
    until("callers are refused", async || worker.status().await.ends.contains_key("no_slot")).await;
    let status = worker.status().await;
    assert_eq!((status.state.as_str(), status.slots), ("Joining", 0), "{status:?}");
    assert!(herd.judge.calls().is_empty());
    herd.redis.go_on();
    let began = Instant::now();
    let first: Call = {
        herd.full().await;
        herd.judge.calls()[0].clone()
    };
    assert!(
        first.began >= began + herd.times.ttl - MS(50),
        "a new store gives nothing before it has learned"
    );
    herd.holds(6, all);
}
