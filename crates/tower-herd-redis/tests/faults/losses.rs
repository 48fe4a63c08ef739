//! A store that loses its data while the ceiling is full.

use crate::{
    herd::{Herd, MS, all, is_long},
    support::Redis,
};
use std::time::Duration;
use tokio::time::{Instant, sleep};

const KEY: &str = "herd:v1:{llm}";

/// Row: data lost. It holds; and full use is back within one learning period and 2 s.
async fn lost(mut herd: Herd, lose: impl AsyncFnOnce(&mut Herd)) {
    let workers = herd.start_all(&["a", "b", "c"]);
    herd.full().await;
    let began = Instant::now();
    lose(&mut herd).await;
    let at = Instant::now();
    // One who knows of nothing joins, and one who had a third of it has no use for it any more: slots move.
    let _new = herd.start("new", |_| {});
    let mut workers = workers;
    workers[0].load(0, 0).await;
    let learned = began + herd.times.ttl;
    herd.full_within(learned, at - began + MS(2000), "full use after the learning period").await;
    sleep(herd.times.ttl).await;
    herd.holds(6, all);
    for worker in &mut workers {
        let status = worker.status().await;
        assert_eq!((status.ceiling, status.overshoot), (6, 0), "{status:?}");
        assert!(status.ends.keys().all(|end| end == "200"), "{status:?}");
    }
}

#[tokio::test]
async fn flushall() {
    lost(Herd::new(6).await, async |herd| assert_eq!(herd.redis.cli(&["FLUSHALL"]), "OK")).await;
}

// dv/redis-semaphore#69: there are no companion keys that could be left, and nobody hangs without the one key.
#[tokio::test]
async fn redis_semaphore_69_the_key_is_deleted() {
    lost(Herd::new(6).await, async |herd| assert_eq!(herd.redis.cli(&["DEL", KEY]), "1")).await;
}

#[tokio::test]
async fn twice_within_the_learning_period() {
    lost(Herd::new(6).await, async |herd| {
        assert_eq!(herd.redis.cli(&["FLUSHALL"]), "OK");
        sleep(herd.times.ttl / 2).await;
        assert_eq!(herd.redis.cli(&["FLUSHALL"]), "OK");
    })
    .await;
}

// redis-rs/redis-rs#1190, #563: everybody connects again.
#[tokio::test]
async fn redis_rs_1190_563_a_restart_without_data() {
    lost(Herd::new(6).await, async |herd| herd.redis.restart().await).await;
}

// redis/redis#8623, #6565: at maxmemory the key is evicted, and for a while scripts that write fail although the policy is
// `allkeys-lru`.
#[tokio::test]
async fn redis_8623_6565_evicted_at_maxmemory() {
    lost(Herd::new(6).await, async |herd| {
        let evicted = |redis: &Redis| redis.info("evicted_keys").parse::<u64>().unwrap();
        assert_eq!(herd.redis.cli(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]), "OK");
        assert_eq!(herd.redis.cli(&["CONFIG", "SET", "maxmemory", "1"]), "OK");
        sleep(herd.times.gap).await;
        assert_eq!(herd.redis.cli(&["CONFIG", "SET", "maxmemory", "0"]), "OK");
        assert!(evicted(&herd.redis) >= 1, "{}", evicted(&herd.redis));
    })
    .await;
}

// swarthy/redis-semaphore#205, dv/redis-semaphore#69: again and again, at any moment, under contention. It never holds
// up for longer than the last loss asks for, and nobody loses what it has.
#[tokio::test]
async fn redis_semaphore_205_deleted_at_random_moments_under_contention() {
    let seed = std::env::var("TOWER_HERD_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(205);
    eprintln!("TOWER_HERD_SEED={seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let (many, ceiling, rounds) = if is_long() { (32, 25, 40) } else { (10, 9, 6) };
    let mut herd = Herd::new(ceiling).await;
    herd.plan.load.hold = 60;
    let names: Vec<String> = (0..many).map(|number| number.to_string()).collect();
    let mut workers: Vec<_> =
        names.iter().map(|name| herd.start(name, |plan| plan.load.callers = 4)).collect();
    herd.full().await;
    for _ in 0..rounds {
        sleep(MS(rng.u64(100..1500))).await;
        match rng.u8(..3) {
            0 => herd.redis.cli(&["FLUSHALL"]),
            1 => herd.redis.cli(&["DEL", KEY]),
            _ => herd.redis.cli(&["SCRIPT", "FLUSH"]),
        };
    }
    let last = Instant::now();
    sleep(herd.times.ttl).await;
    herd.full_within(last + herd.times.ttl, Duration::from_secs(2), "full use after the last loss").await;
    sleep(herd.times.ttl * 2).await;
    herd.holds(ceiling as usize, all);
    for worker in &mut workers {
        let done = herd.judge.began(last + herd.times.ttl, Instant::now(), |call| worker.owns(call));
        let status = worker.status().await;
        assert!(done > 0, "one of {many} had no turn: {status:?}");
        assert!(status.ends.keys().all(|end| end == "200"), "{status:?}");
    }
}
