//! The stack against a provider that nobody here wrote: nginx, two workers, `limit_conn` or `limit_req`,
//! answering 429. All counts come from nginx's own log.
//!
//! nginx counts a call a little longer than the client does: it counts down after the last byte was handed
//! to the socket, and after a caller has hung up once it has noticed. So a client at exactly its limit is
//! refused now and then; one a tenth below it never.

#[path = "support/nginx.rs"]
mod nginx;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use nginx::{Config, Limit, Log, Reply, Upstream};
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};
use tower::{ServiceBuilder, ServiceExt};
use tower_herd::{
    AttemptTimeoutLayer, ClassifyLayer, Fleet, FleetLimitLayer, JitteredRetryLayer, Provider,
    ProviderSettings, RetryAfterLayer, Safety, Task, TaskLayer, random::Seeds,
};

const LIMIT: u32 = 20;
const LATENCY: Duration = Duration::from_millis(20);

fn client() -> Client<HttpConnector, Full<Bytes>> {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new()).pool_max_idle_per_host(512).build(connector)
}

#[derive(Clone, Copy)]
struct Load {
    agents: usize,
    calls: usize,
    /// One call in five is given up by its caller: somewhere between the instant at which it is sent and a
    /// little later than its reply should be there. Nine of ten of them so while they run at nginx.
    cancelled: bool,
}

#[derive(Debug, Default)]
struct Tally {
    done: AtomicUsize,
    given_up: AtomicUsize,
    lost: AtomicUsize,
    next: AtomicUsize,
}

/// The agents, each with one call at a time through the stack.
async fn run(url: String, provider: &Provider, load: Load) -> Arc<Tally> {
    let stack = ServiceBuilder::new()
        .layer(TaskLayer::new().with(|request: &http::Request<Full<Bytes>>, task: Task| {
            match request.headers().get("x-agent") {
                Some(agent) => task.caller(agent.as_bytes()),
                None => task,
            }
        }))
        .layer(JitteredRetryLayer::new())
        .layer(RetryAfterLayer::new(provider))
        .layer(FleetLimitLayer::new(provider))
        .layer(ClassifyLayer::new(provider))
        .layer(AttemptTimeoutLayer::default())
        .map_request(|request: http::Request<Full<Bytes>>| {
            if let Some(sent) = request.extensions().get::<Arc<Notify>>() {
                sent.notify_one();
            }
            request
        })
        .service(client());
    let seeds = Seeds::from_seed(seed());
    let tally = Arc::new(Tally::default());
    let agents: Vec<_> = (0..load.agents)
        .map(|agent| {
            let (stack, url, tally, mut random) =
                (stack.clone(), url.clone(), tally.clone(), seeds.session());
            tokio::spawn(async move {
                loop {
                    let number = tally.next.fetch_add(1, SeqCst);
                    if number >= load.calls {
                        return;
                    }
                    let sent = Arc::new(Notify::new());
                    let request = http::Request::post(&url)
                        .header("x-agent", agent)
                        .extension(Safety::Costly)
                        .extension(sent.clone())
                        .body(Full::from("{\"prompt\":\"?\"}"))
                        .unwrap();
                    let call = async {
                        let reply = stack.clone().oneshot(request).await.ok()?;
                        let ok = reply.status().is_success();
                        reply.into_body().collect().await.ok().filter(|_| ok)
                    };
                    let patience = async {
                        if load.cancelled && number % 5 == 0 {
                            sent.notified().await;
                            sleep(random.up_to(LATENCY * 11 / 10)).await;
                        } else {
                            std::future::pending::<()>().await;
                        }
                    };
                    let count = tokio::select! {
                        biased;
                        outcome = call => if outcome.is_some() { &tally.done } else { &tally.lost },
                        () = patience => &tally.given_up,
                    };
                    count.fetch_add(1, SeqCst);
                }
            })
        })
        .collect();
    for agent in agents {
        agent.await.unwrap();
    }
    // Dropped calls linger; then nothing may be left.
    let deadline = Instant::now() + Duration::from_secs(11);
    while (provider.in_flight(), provider.waiting()) != (0, 0) {
        assert!(Instant::now() < deadline, "not given back: {provider:?}");
        sleep(Duration::from_millis(5)).await;
    }
    tally
}

fn seed() -> u64 {
    std::env::var("TOWER_HERD_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

/// `limit_conn`, with the ceiling configured. The share of 429s among the calls that nginx saw.
async fn configured(ceiling: u32, load: Load, aborts: bool) -> f64 {
    let upstream = Upstream::start(|_| Reply::after(LATENCY)).await;
    let nginx = Config::new(upstream.addr())
        .limit_conn(LIMIT)
        .retry_after(1)
        .ignore_client_abort(!aborts)
        .start()
        .await;
    let settings = ProviderSettings::new().ceiling(ceiling).aborts(aborts);
    let provider = Fleet::local().seed(seed()).configure("nginx", settings).unwrap();
    let start = Instant::now();
    let tally = run(nginx.url("/v1/complete"), &provider, load).await;
    let took = start.elapsed();
    let log = nginx.finish().await;
    let throttled = log.count(429);
    println!(
        "seed {}, ceiling {ceiling}, {aborts}: {took:?}, {} lines, 200: {}, 429: {throttled}, 499: {}, peak {}, {tally:?}",
        seed(),
        log.0.len(),
        log.count(200),
        log.count(499),
        upstream.counts().peak(),
    );
    assert_eq!(tally.lost.load(SeqCst), 0, "{tally:?}");
    if load.cancelled {
        assert!(tally.given_up.load(SeqCst) > load.calls / 10, "{tally:?}");
        assert_eq!(log.count(499) > load.calls / 10, aborts, "it sees who hangs up, or does not look");
    }
    assert_eq!(tally.done.load(SeqCst) + tally.given_up.load(SeqCst), load.calls);
    assert_eq!(log.workers(), 2, "both workers count");
    throttled as f64 / log.0.len() as f64
}

const WHOLE: Load = Load { agents: 60, calls: 4000, cancelled: false };
const CANCELLED: Load = Load { cancelled: true, ..WHOLE };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_at_its_limit_refuses_less_than_one_in_a_thousand() {
    let share = configured(LIMIT, WHOLE, false).await;
    assert!(share < 0.001, "{share}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_at_nine_tenths_of_its_limit_refuses_nobody() {
    assert_eq!(configured(LIMIT * 9 / 10, WHOLE, false).await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_at_its_limit_with_cancelled_calls_that_it_runs_to_their_end() {
    let share = configured(LIMIT, CANCELLED, false).await;
    assert!(share < 0.001, "{share}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_at_nine_tenths_with_cancelled_calls_that_it_runs_to_their_end() {
    assert_eq!(configured(LIMIT * 9 / 10, CANCELLED, false).await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_at_its_limit_with_cancelled_calls_that_it_aborts() {
    let share = configured(LIMIT, CANCELLED, true).await;
    assert!(share < 0.001, "{share}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_at_nine_tenths_with_cancelled_calls_that_it_aborts() {
    assert_eq!(configured(LIMIT * 9 / 10, CANCELLED, true).await, 0.0);
}

/// Nothing is configured: a hundred agents find out. Wire calls over tasks.
async fn learned(config: impl FnOnce(Config) -> Config, calls: usize) -> (f64, Duration, Log) {
    let upstream = Upstream::start(|_| Reply::after(LATENCY)).await;
    let nginx = config(Config::new(upstream.addr())).start().await;
    let provider = Fleet::local().seed(seed()).provider("nginx");
    let start = Instant::now();
    let tally =
        run(nginx.url("/v1/complete"), &provider, Load { agents: 100, calls, cancelled: false }).await;
    let took = start.elapsed();
    let log = nginx.finish().await;
    let amplification = log.0.len() as f64 / calls as f64;
    println!(
        "seed {}: {took:?}, amplification {amplification:.3}, 429: {}, {provider:?}, {tally:?}",
        seed(),
        log.count(429)
    );
    assert_eq!(tally.done.load(SeqCst), calls, "every request finishes: {tally:?}");
    (amplification, took, log)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_unknown_ceiling_with_a_hint() {
    let (amplification, _, log) = learned(|nginx| nginx.limit_conn(LIMIT).retry_after(1), 3000).await;
    assert!(amplification < 1.05, "{amplification}");
    assert_eq!(log.refused_by(Limit::Connections), log.count(429));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_unknown_ceiling_and_bare_429s() {
    let (amplification, ..) = learned(|nginx| nginx.limit_conn(LIMIT), 3000).await;
    assert!(amplification < 1.05, "{amplification}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_unknown_rate_with_a_hint() {
    let (amplification, _, log) = learned(|nginx| nginx.limit_req(200, 20).retry_after(1), 1500).await;
    assert!(amplification < 1.25, "{amplification}");
    assert_eq!(log.refused_by(Limit::Rate), log.count(429));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_unknown_rate_and_bare_429s() {
    let (amplification, ..) = learned(|nginx| nginx.limit_req(200, 20), 1500).await;
    assert!(amplification < 1.25, "{amplification}");
}

/// A task that asks for less time than its wait would take is told so, not lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_too_little_time_is_a_refusal_with_its_instant() {
    let upstream = Upstream::start(|_| Reply::after(Duration::from_millis(500))).await;
    let nginx = Config::new(upstream.addr()).limit_conn(1).retry_after(30).start().await;
    let provider = Fleet::local().configure("nginx", ProviderSettings::new().ceiling(2)).unwrap();
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new())
        .layer(JitteredRetryLayer::new())
        .layer(RetryAfterLayer::new(&provider))
        .layer(FleetLimitLayer::new(&provider))
        .layer(ClassifyLayer::new(&provider))
        .service(client());
    let call = |id: u64| {
        let mut request = http::Request::get(nginx.url("/v1")).body(Full::<Bytes>::default()).unwrap();
        request.extensions_mut().insert(Task::new(id).deadline_in(Duration::from_secs(5)));
        service.clone().oneshot(request)
    };
    let start = Instant::now();
    let (one, two) = tokio::join!(call(1), call(2));
    let mut statuses = [one, two].map(|reply| reply.unwrap().status().as_u16());
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 429], "the last real reply is returned");
    let refused = call(3).await.unwrap_err();
    let refusal = tower_herd::Refusal::find(&*refused).expect("a refusal");
    assert!(refusal.wait().unwrap() > Duration::from_secs(25), "{refusal}");
    assert!(start.elapsed() < Duration::from_secs(4), "at once: {:?}", start.elapsed());
    assert_eq!(nginx.finish().await.0.len(), 2, "the third never left");
}
