//! Processes that are cut off from the store, and not from the provider.

use crate::{
    herd::{Herd, MS, Worker, all, until},
    judge::Call,
    support::proxy::{Flow, Proxy},
    worker::{Load, Policy},
};
use fastrand::Rng;
use std::time::Duration;
use tokio::time::{Instant, sleep};

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap()
}

/// What one of three had in flight that was cut off, and all others.
struct Cut {
    herd: Herd,
    far: Worker,
    at: Instant,
}

/// One of three, with calls that take `hold`, reaches the store by a proxy alone, which `cut` breaks for one and a half
/// ttl.
async fn cut_off(herd: Herd, far_load: Load, cut: impl FnOnce(&Proxy)) -> Cut {
    let proxy = Proxy::start(herd.redis.port());
    let mut far = herd.start("far", |plan| {
        (plan.store, plan.load) = (proxy.url(), far_load);
    });
    until("it has joined", async || far.status().await.slots > 0).await;
    let load = Load { callers: herd.plan.ceiling, hold: 300 };
    let mut near: Vec<Worker> =
        ["b", "c"].iter().map(|name| herd.start(name, |plan| plan.load = load)).collect();
    for other in &mut near {
        until("the others have joined", async || other.status().await.members == 3).await;
    }
    sleep(MS(1000)).await;
    herd.full().await;
    cut(&proxy);
    let at = Instant::now();
    sleep(herd.times.beyond().max(herd.times.ttl + MS(far_load.hold))).await;
    proxy.heal();
    let healed = Instant::now();
    sleep(herd.times.renewal()).await;
    herd.filled(healed, herd.plan.ceiling as usize, all).await;
    until("it is back", async || far.status().await.state == "Held").await;
    drop(near);
    Cut { herd, far, at }
}

impl Cut {
    /// Of who was cut off, begun while its lease could still be used. The last of them can have begun so much later:
    /// the provider reads the clock when it has read the request.
    fn is_old(&self) -> impl Fn(&Call) -> bool + '_ {
        move |call| self.far.owns(call) && call.began < self.at + self.herd.times.used() + MS(300)
    }

    /// Whether what began after the lease had run out, and before it was healed, is none.
    fn began_without_a_lease(&self) -> usize {
        let from = self.at + self.herd.times.used() + MS(300);
        self.herd.judge.began(from, self.at + self.herd.times.ttl, |call| self.far.owns(call))
    }
}

// Row: a process is cut off from the store. Exceeded by its calls in flight, until they end; strict: it holds.
// redis-rs/redis-rs#275, #1513: nothing comes back, and nothing says so.
#[tokio::test]
async fn redis_rs_275_1513_cut_off_with_calls_in_flight() {
    let times = crate::herd::Times::get();
    let hold = times.ttl * 8 / 5;
    let load = Load { callers: 6, hold: millis(hold) };
    let default = async { cut_off(Herd::new(6).await, load, Proxy::black_hole).await };
    let strict = async {
        let mut herd = Herd::new(6).await;
        herd.plan.strict = Some(millis(hold) + 500);
        cut_off(herd, load, Proxy::black_hole).await
    };
    let (default, strict) = tokio::join!(default, strict);
    let most = default.herd.judge.most(default.herd.began, all);
    let far = default.herd.judge.most(default.at, |call| default.far.owns(call));
    eprintln!("default: {most} in flight of 6, {far} of who was cut off");
    assert_eq!(default.began_without_a_lease(), 0);
    assert!(most <= 6 + far, "{most} in flight, of 6 and {far} of who was cut off");
    default.herd.holds(6, |call| !default.is_old()(call));
    // And nothing at all was exceeded before the ttl.
    let early = default.at + times.ttl - times.renewal() - MS(100);
    default.herd.holds(6, |call| call.began < early);
    assert_eq!(strict.began_without_a_lease(), 0);
    strict.herd.holds(6, all);
}

// Calls that end before the ttl does hold the ceiling in each mode: nothing is begun after `ttl - gap - 50 ms`.
#[tokio::test]
async fn cut_off_with_short_calls_in_each_way() {
    let load = Load { callers: 6, hold: 200 };
    let cuts: [fn(&Proxy); 4] = [
        Proxy::black_hole,
        // Its reports are taken in, and it does not hear so.
        |proxy| proxy.down(Flow::Lose),
        // They come late, on a connection that was given up.
        |proxy| proxy.up(Flow::Hold),
        |proxy| {
            proxy.refuse(true);
            proxy.cut();
        },
    ];
    let cut = async |cut| cut_off(Herd::new(6).await, load, cut).await;
    let [a, b, c, d] = cuts;
    for cut in <[Cut; 4]>::from(tokio::join!(cut(a), cut(b), cut(c), cut(d))) {
        assert_eq!(cut.began_without_a_lease(), 0);
        cut.herd.holds(6, all);
    }
}

// Policy `keep`: who is cut off goes on with its safe share, which nobody else is given. It holds.
#[tokio::test]
async fn cut_off_it_goes_on_with_what_is_safe() {
    let mut herd = Herd::new(12).await;
    herd.plan.outage = Policy::Keep(0.5);
    let cut = cut_off(herd, Load { callers: 12, hold: 200 }, Proxy::black_hole).await;
    let (from, to) = (cut.at + cut.herd.times.ttl, cut.at + cut.herd.times.beyond());
    // Half of an equal share of 4.
    let most = cut.herd.judge.most(from, |call| cut.far.owns(call) && call.began < to);
    assert!((1..=2).contains(&most), "{most} of who was cut off");
    assert!(cut.herd.judge.began(from, to, |call| cut.far.owns(call)) > 0, "it went on");
    cut.herd.holds(12, all);
}

// Row: messages lost, delayed and late, of all processes. It holds, and everybody comes back.
#[tokio::test]
async fn redis_rs_1190_563_lines_that_break_in_all_ways_all_the_time() {
    let seed = std::env::var("TOWER_HERD_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1190);
    eprintln!("TOWER_HERD_SEED={seed}");
    let mut rng = Rng::with_seed(seed);
    let mut herd = Herd::new(7).await;
    herd.plan.load.hold = 150;
    let proxies: Vec<Proxy> = (0..4).map(|_| Proxy::start(herd.redis.port())).collect();
    let mut workers = Vec::new();
    for (name, proxy) in ["a", "b", "c", "d"].iter().zip(&proxies) {
        workers.push(herd.start(name, |plan| plan.store = proxy.url()));
    }
    herd.full().await;
    let rounds = if crate::herd::is_long() { 600 } else { 40 };
    for _ in 0..rounds {
        let proxy = &proxies[rng.usize(..proxies.len())];
        let flow = [Flow::Pass, Flow::Lose, Flow::Hold];
        match rng.u8(..6) {
            0 => proxy.up(flow[rng.usize(..3)]),
            1 => proxy.down(flow[rng.usize(..3)]),
            2 => proxy.delay(MS(rng.u64(..150))),
            3 => proxy.cut(),
            _ => proxy.heal(),
        }
        sleep(MS(rng.u64(20..400))).await;
    }
    proxies.iter().for_each(Proxy::heal);
    let healed = Instant::now();
    sleep(herd.times.ttl).await;
    herd.filled(healed + herd.times.ttl, 7, all).await;
    herd.holds(7, all);
    for worker in &mut workers {
        until("all are back", async || worker.status().await.state == "Held").await;
        assert!(worker.status().await.ends.keys().all(|end| end == "200"));
    }
}
