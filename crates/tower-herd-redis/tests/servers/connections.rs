//! Connections that break, hang, and come back.

use crate::{
    Holder,
    support::{
        Redis,
        proxy::{Flow, Proxy},
        until,
    },
    until_answered, words,
};
use std::time::Duration;
use tokio::time::{Instant, interval, sleep};
use tower_herd::store::{FleetStore as _, StoreErrorKind};
use tower_herd_redis::{RedisConfig, RedisStore};

/// Of [`quick`].
const PATIENCE: Duration = Duration::from_millis(400);

fn quick(url: &str) -> RedisStore {
    RedisStore::new(RedisConfig::single(url).unwrap().response_timeout(PATIENCE)).unwrap()
}

#[tokio::test]
async fn a_connection_that_the_server_closed_is_replaced() {
    let redis = Redis::start().await;
    let store = crate::open(&redis.url());
    let mut holder = Holder::new(1);
    holder.exchange(&store, "llm").await.unwrap();
    for _ in 0..10 {
        redis.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
        // What was closed while nobody used it is seen before it is used; if both happen at once, one exchange fails.
        let (_, errors) = until_answered(&store, "llm", &mut holder).await;
        assert!(
            errors.len() <= 1 && errors.iter().all(|kind| *kind == StoreErrorKind::Unreachable),
            "{errors:?}"
        );
    }
}

/// redis-rs/redis-rs#1190, #563: the connection never came back, or the client panicked.
#[tokio::test]
async fn redis_rs_1190_563_a_restart_under_ticks_of_a_millisecond() {
    let mut redis = Redis::start().await;
    let store = crate::open(&redis.url());
    let ticking = store.clone();
    let ticks = tokio::spawn(async move {
        let mut holder = Holder::new(1);
        let mut tick = interval(Duration::from_millis(1));
        let (mut good, mut bad) = (0_u32, Vec::new());
        loop {
            tick.tick().await;
            match holder.exchange(&ticking, "llm").await {
                Ok(_) => good += 1,
                Err(error) => bad.push(error.kind()),
            }
            if holder.report.seq >= 3000
                || (good > 100 && bad.len() > 100 && holder.report.seq.is_multiple_of(500))
            {
                return (good, bad);
            }
        }
    });
    for _ in 0..3 {
        sleep(Duration::from_millis(200)).await;
        redis.kill();
        sleep(Duration::from_millis(150)).await;
        redis.start_again().await;
    }
    let (good, bad) = ticks.await.unwrap();
    assert!(good > 100, "{good}");
    assert!(
        bad.iter().all(|kind| matches!(kind, StoreErrorKind::Unreachable | StoreErrorKind::Timeout)),
        "{bad:?}"
    );
    until_answered(&store, "llm", &mut Holder::new(2)).await;
}

/// Back-off: a server that is down is not asked at each tick, and no tick waits for it.
#[tokio::test]
async fn a_server_that_is_down_is_tried_less_and_less_often() {
    let redis = Redis::start().await;
    let proxy = Proxy::start(redis.port());
    proxy.refuse(true);
    let store = crate::open(&proxy.url());
    let mut holder = Holder::new(1);
    let began = Instant::now();
    let mut failed = 0;
    while began.elapsed() < Duration::from_secs(3) {
        assert_eq!(holder.exchange(&store, "llm").await.unwrap_err().kind(), StoreErrorKind::Unreachable);
        failed += 1;
        sleep(Duration::from_millis(2)).await;
    }
    // Of waits of at least 25, 50, 100 and so on, no more than this many fit into the time.
    let tried = proxy.accepted();
    assert!((3..=9).contains(&tried), "{tried} attempts, {failed} exchanges");
    assert!(failed > 2 * tried, "{failed} exchanges");
    proxy.refuse(false);
    until_answered(&store, "llm", &mut holder).await;
}

/// redis-rs/redis-rs#275, #1513: a connection on which nothing comes any more was kept for half a minute.
#[tokio::test]
async fn redis_rs_275_1513_a_black_hole_is_a_timeout_and_its_connection_is_not_used_again() {
    let redis = Redis::start().await;
    for (up, down) in [(Flow::Lose, Flow::Lose), (Flow::Hold, Flow::Pass), (Flow::Pass, Flow::Hold)] {
        let proxy = Proxy::start(redis.port());
        let store = quick(&proxy.url());
        let mut holder = Holder::new(1);
        let provider = format!("{up:?}{down:?}");
        until_answered(&store, &provider, &mut holder).await;
        let connections = proxy.accepted();
        proxy.up(up);
        proxy.down(down);
        let began = Instant::now();
        let error = holder.exchange(&store, &provider).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error:?}");
        assert!(began.elapsed() >= PATIENCE);
        // Nor is there an answer over a new one, while it lasts.
        let error = holder.exchange(&store, &provider).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error:?}");
        proxy.heal();
        let (grant, errors) = until_answered(&store, &provider, &mut holder).await;
        assert!(errors.iter().all(|kind| *kind == StoreErrorKind::Timeout), "{errors:?}");
        assert!(proxy.accepted() > connections);
        // Over the old one nothing old comes.
        assert!(!grant.stale);
    }
}

/// Whoever exchanges may have less patience than the store: it drops the exchange, and the connection is found out all the
/// same.
#[tokio::test]
async fn a_black_hole_is_noticed_by_those_who_give_up_early() {
    let redis = Redis::start().await;
    let proxy = Proxy::start(redis.port());
    let store = quick(&proxy.url());
    let mut holder = Holder::new(1);
    until_answered(&store, "llm", &mut holder).await;
    let connections = proxy.accepted();
    proxy.black_hole();
    let began = Instant::now();
    until("another connection", async || {
        let patience = Duration::from_millis(50);
        let answer = tokio::time::timeout(patience, holder.exchange(&store, "llm")).await;
        assert!(!matches!(answer, Ok(Ok(_))));
        proxy.accepted() > connections
    })
    .await;
    assert!(began.elapsed() >= PATIENCE);
    proxy.heal();
    until_answered(&store, "llm", &mut holder).await;
}

/// The report arrives, its answer does not: it counts, and is not sent again.
#[tokio::test]
async fn a_lost_answer_is_a_timeout_and_its_report_was_taken_in_once() {
    let redis = Redis::start().await;
    let proxy = Proxy::start(redis.port());
    let store = quick(&proxy.url());
    let mut holder = Holder::new(1);
    until_answered(&store, "llm", &mut holder).await;
    let ran = redis.calls("evalsha") + redis.calls("eval");
    proxy.down(Flow::Lose);
    assert_eq!(holder.exchange(&store, "llm").await.unwrap_err().kind(), StoreErrorKind::Timeout);
    let lost = holder.report.seq;
    until("it ran", async || redis.calls("evalsha") + redis.calls("eval") == ran + 1).await;
    proxy.heal();
    let (grant, _) = until_answered(&store, "llm", &mut holder).await;
    assert!(grant.before >= lost, "{grant:?}");
    assert!(!grant.stale);
}

/// A report that was given up here runs later there, and a newer one has been taken in meanwhile.
#[tokio::test]
async fn a_report_that_comes_late_changes_nothing() {
    let redis = Redis::start().await;
    let proxy = Proxy::start(redis.port());
    let store = quick(&proxy.url());
    let mut holder = Holder::new(1);
    until_answered(&store, "llm", &mut holder).await;
    let known = holder.report.seq;
    proxy.up(Flow::Hold);
    assert_eq!(holder.exchange(&store, "llm").await.unwrap_err().kind(), StoreErrorKind::Timeout);
    let direct = crate::open(&redis.url());
    assert_eq!(holder.exchange(&direct, "llm").await.unwrap().before, known);
    let ran = redis.calls("evalsha") + redis.calls("eval");
    proxy.heal();
    // If the closed connection was faster than its bytes, there is nothing late to see.
    sleep(Duration::from_millis(100)).await;
    let late = redis.calls("evalsha") + redis.calls("eval") - ran;
    assert!(late <= 1, "{late}");
    assert_eq!(holder.exchange(&direct, "llm").await.unwrap().before, known + 2);
    let mut old = Holder::new(1);
    old.report.seq = known;
    assert!(old.exchange(&direct, "llm").await.unwrap().stale);
}

#[tokio::test]
async fn a_paused_a_sleeping_and_a_stopped_server_time_out_and_are_back_afterwards() {
    let redis = Redis::with(&["--enable-debug-command", "yes"]).await;
    let store = quick(&redis.url());
    let mut holder = Holder::new(1);
    until_answered(&store, "llm", &mut holder).await;
    for trouble in ["pause", "sleep", "stop"] {
        match trouble {
            "pause" => assert_eq!(redis.cli(&["CLIENT", "PAUSE", "800"]), "OK"),
            "sleep" => {
                let socket = redis.folder().join("sock");
                let mut command = tokio::process::Command::new("redis-cli");
                command.arg("-s").arg(socket).args(["DEBUG", "SLEEP", "0.8"]).kill_on_drop(true);
                let mut asleep = command.stdout(std::process::Stdio::null()).spawn().unwrap();
                sleep(Duration::from_millis(100)).await;
                assert!(asleep.try_wait().unwrap().is_none());
                tokio::spawn(async move { asleep.wait().await });
            }
            _ => redis.stop(),
        }
        let error = holder.exchange(&store, "llm").await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Timeout, "{trouble}: {error:?}");
        if trouble == "stop" {
            redis.go_on();
        }
        let (grant, errors) = until_answered(&store, "llm", &mut holder).await;
        assert!(errors.iter().all(|kind| *kind == StoreErrorKind::Timeout), "{trouble}: {errors:?}");
        assert!(!grant.stale);
    }
}

/// A connection that takes longer than an exchange has time is there for a later one.
#[tokio::test]
async fn a_slow_connection_is_made_beside_the_exchanges() {
    let redis = Redis::start().await;
    let mut holder = Holder::new(1);
    holder.exchange(&crate::open(&redis.url()), "llm").await.unwrap();
    let proxy = Proxy::start(redis.port());
    // Three questions of a greeting, 180 ms each way.
    proxy.delay(Duration::from_millis(180));
    let config = RedisConfig::single(&proxy.url()).unwrap().connect_timeout(Duration::from_secs(10));
    let store = RedisStore::new(config.response_timeout(Duration::from_secs(1))).unwrap();
    let (_, errors) = until_answered(&store, "llm", &mut holder).await;
    assert!(!errors.is_empty() && errors.iter().all(|kind| *kind == StoreErrorKind::Timeout), "{errors:?}");
    // Were it begun anew by each exchange, it would be one more.
    assert!(proxy.accepted() <= errors.len(), "{} {errors:?}", proxy.accepted());
    until_answered(&store, "llm", &mut holder).await;
}

/// Answers are matched with questions, however many there are and whichever are given up.
#[tokio::test]
async fn exchanges_at_once_and_dropped_ones_do_not_mix_up_answers() {
    let redis = Redis::start().await;
    let store = crate::open(&redis.url());
    Holder::new(99).exchange(&store, "first").await.unwrap();
    let mut random = fastrand::Rng::with_seed(7);
    let mut sent = [0_u64; 4];
    for _ in 0..200 {
        let place = random.usize(0..4);
        let mut holder = Holder::new(1);
        holder.report.seq = sent[place];
        sent[place] += 1;
        let store = store.clone();
        let patience = Duration::from_micros(random.u64(0..400));
        let provider = format!("provider {place}");
        drop(tokio::time::timeout(patience, async move { holder.exchange(&store, &provider).await }).await);
    }
    let exchanges = (0..4).map(|place| {
        let (store, seq) = (store.clone(), sent[place]);
        async move {
            let mut holder = Holder::new(1);
            holder.report.seq = seq;
            let grant = holder.exchange(&store, &format!("provider {place}")).await.unwrap();
            assert!(!grant.stale && grant.before <= seq, "{grant:?}");
            assert_eq!(holder.exchange(&store, &format!("provider {place}")).await.unwrap().before, seq + 1);
        }
    });
    futures_util::future::join_all(exchanges).await;
    assert_eq!(redis.info("total_connections_received").parse::<u64>().unwrap(), 1 + 2);
}

/// What is connected lives on the runtime of the exchange that needed it; if that goes, the next connects anew.
#[test]
fn a_runtime_that_goes_takes_its_connection_with_it() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let first = runtime();
    let redis = first.block_on(Redis::start());
    let store = crate::open(&redis.url());
    let mut holder = Holder::new(1);
    first.block_on(holder.exchange(&store, "llm")).unwrap();
    drop(first);
    let second = runtime();
    let (_, errors) = second.block_on(until_answered(&store, "llm", &mut holder));
    assert!(errors.len() <= 1, "{errors:?}");
    // While it connects, too.
    redis.stop();
    redis_is_silent(&redis, &mut holder);
    redis.go_on();
}

fn redis_is_silent(redis: &Redis, holder: &mut Holder) {
    let store = quick(&redis.url());
    for _ in 0..2 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let error = runtime.block_on(holder.exchange(&store, "llm")).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Timeout, "{}", words(&error));
    }
}

#[tokio::test]
async fn what_is_no_redis_is_an_error() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::io::AsyncWriteExt::write_all(&mut stream, b"HTTP/1.1 400 Bad Request\r\n\r\n").await.ok();
        }
    });
    let store = quick(&format!("redis://127.0.0.1:{port}/"));
    let error = store.exchange("llm", Holder::new(1).next()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Invalid, "{error:?}");
    let nobody = crate::support::free_port();
    let store = quick(&format!("redis://127.0.0.1:{nobody}/"));
    let error = store.exchange("llm", Holder::new(1).next()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unreachable, "{error:?}");
    let store = quick("unix:///nowhere/at/all.sock");
    let error = store.exchange("llm", Holder::new(1).next()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unreachable, "{error:?}");
}
