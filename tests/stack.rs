//! Whole stacks over real sockets: hyper-util's client against a small server.

#[path = "support/server.rs"]
mod server;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use server::{Server, answer};
use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout};
use tower::{Service, ServiceBuilder, ServiceExt, buffer::BufferLayer, service_fn};
use tower_herd::{
    AttemptTimeoutLayer, BoxError, ClassifyLayer, Exhausted, Fleet, FleetLimitLayer, HashedFailoverLayer,
    JitteredRetryLayer, Provider, ProviderSettings, Refusal, RefusalKind, RetryAfterLayer, Safety, Task,
    TaskLayer, failover::Rung,
};

type Request = http::Request<Full<Bytes>>;

fn client() -> Client<HttpConnector, Full<Bytes>> {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new()).build(connector)
}

fn request(url: &str) -> Request {
    http::Request::post(url).extension(Safety::Costly).body(Full::from("{}")).unwrap()
}

fn provider(ceiling: u32) -> Provider {
    named("p", ProviderSettings::new().ceiling(ceiling))
}

fn named(name: &str, settings: ProviderSettings) -> Provider {
    Fleet::local().configure(name, settings).unwrap()
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn to(url: &str) -> impl Fn(Request) -> Request + Send + Sync + 'static {
    let uri: http::Uri = url.parse().unwrap();
    move |mut request| {
        *request.uri_mut() = uri.clone();
        request
    }
}

/// The layers of one rung. A macro, since each use has another inner service.
macro_rules! rung {
    ($provider:expr) => {
        ServiceBuilder::new()
            .layer(RetryAfterLayer::new($provider))
            .layer(FleetLimitLayer::new($provider))
            .layer(ClassifyLayer::new($provider))
            .layer(AttemptTimeoutLayer::default())
            .into_inner()
    };
}

/// The stack of one provider.
macro_rules! stack {
    ($provider:expr, $service:expr) => {
        ServiceBuilder::new()
            .layer(TaskLayer::new())
            .layer(JitteredRetryLayer::new())
            .layer(rung!($provider))
            .service($service)
    };
}

/// A ladder of these (provider, url), a tier each.
macro_rules! ladder {
    ($(($provider:expr, $url:expr)),+) => {{
        let mut tier = 0;
        let rungs = [$({
            tier += 1;
            Rung::new(&$provider, rung!(&$provider)).tier(tier).map(to($url))
        }),+];
        ServiceBuilder::new()
            .layer(TaskLayer::new())
            .layer(JitteredRetryLayer::new())
            .layer(HashedFailoverLayer::new(rungs).unwrap())
            .service(client())
    }};
}

/// One whole call: the status, and the body.
async fn whole<S, B>(service: S, request: Request) -> Result<(u16, Bytes), BoxError>
where
    S: Service<Request, Response = http::Response<B>, Error: Into<BoxError>>,
    B: http_body::Body<Error: Into<BoxError>>,
{
    let (head, body) = service.oneshot(request).await.map_err(Into::into)?.into_parts();
    Ok((head.status.as_u16(), body.collect().await.map_err(Into::into)?.to_bytes()))
}

/// Waits until the provider holds nothing any more.
async fn settled(provider: &Provider) {
    let deadline = Instant::now() + Duration::from_secs(15);
    while (provider.in_flight(), provider.waiting()) != (0, 0) {
        assert!(Instant::now() < deadline, "not given back: {provider:?}");
        sleep(ms(5)).await;
    }
}

#[tokio::test]
async fn a_retry_after_is_obeyed_by_all_who_share_the_provider_and_never_early() {
    let server = Server::start(|n, _| match n {
        0 => answer(429).header("retry-after", 1),
        _ => answer(200).after(ms(10)),
    })
    .await;
    let p = provider(4);
    let service = stack!(&p, client());
    let first = tokio::spawn(whole(service.clone(), request(&server.url)));
    while p.throttled() == 0 {
        sleep(ms(1)).await;
    }
    let others: Vec<_> =
        (0..10).map(|_| tokio::spawn(whole(service.clone(), request(&server.url)))).collect();
    for call in others.into_iter().chain([first]) {
        assert_eq!(call.await.unwrap().unwrap().0, 200);
    }
    let times = server.counts.times();
    assert_eq!(times.len(), 12, "one refused, eleven served");
    for time in &times[1..] {
        let after = time.duration_since(times[0]);
        assert!(after >= Duration::from_secs(1), "{after:?} after a 429 that said 1 s");
        assert!(after < Duration::from_secs(4), "{after:?}");
    }
    assert_eq!((p.in_flight(), p.waiting(), p.throttled()), (0, 0, 1));
}

#[tokio::test]
async fn a_stream_keeps_its_slot_until_its_end() {
    let server = Server::start(|_, _| answer(200).parts(5, ms(60))).await;
    let p = provider(1);
    let service = stack!(&p, client());
    let start = Instant::now();
    let reply = service.clone().oneshot(request(&server.url)).await.unwrap();
    assert!(start.elapsed() < ms(200), "the head does not wait for the body");
    assert_eq!(p.in_flight(), 1);
    let second = tokio::spawn(whole(service.clone(), request(&server.url)));
    sleep(ms(50)).await;
    assert_eq!((p.in_flight(), p.waiting(), server.counts.calls()), (1, 1, 1));
    reply.into_body().collect().await.unwrap();
    second.await.unwrap().unwrap();
    let times = server.counts.times();
    assert!(times[1] - times[0] >= ms(240), "{:?}", times[1] - times[0]);
    assert_eq!((p.in_flight(), server.counts.peak()), (0, 1));
}

#[tokio::test]
async fn a_dropped_call_gives_its_slot_back_at_once_where_the_provider_aborts_and_later_where_not() {
    for aborts in [true, false] {
        let server = Server::start(|_, _| answer(200).parts(2, ms(100))).await;
        let p = named("p", ProviderSettings::new().ceiling(1).aborts(aborts));
        let service = stack!(&p, client());
        whole(service.clone(), request(&server.url)).await.unwrap();
        // Before the head.
        let call = service.clone().oneshot(request(&server.url));
        timeout(ms(1), call).await.err();
        settled(&p).await;
        // In the body.
        let reply = service.clone().oneshot(request(&server.url)).await.unwrap();
        drop(reply);
        let dropped = Instant::now();
        assert_eq!(p.in_flight(), u32::from(!aborts));
        settled(&p).await;
        assert!(aborts || dropped.elapsed() >= ms(90), "it may still run there: {:?}", dropped.elapsed());
        assert!(dropped.elapsed() < ms(2000), "{:?}", dropped.elapsed());
        assert_eq!(whole(service, request(&server.url)).await.unwrap().0, 200);
    }
}

// Law 4: a failed connect proves that nothing was executed.
#[tokio::test]
async fn a_refused_connection_moves_even_a_write_to_the_next_rung() {
    let server = Server::start(|_, _| answer(200)).await;
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let fleet = Fleet::local();
    let (a, b) = (fleet.provider("a"), fleet.provider("b"));
    let service = ladder!((a, &format!("http://{closed}/")), (b, &server.url));
    let start = Instant::now();
    let mut write = request("http://placeholder.invalid/");
    write.extensions_mut().insert(Safety::Once);
    assert_eq!(whole(service, write).await.unwrap().0, 200);
    assert_eq!(server.counts.calls(), 1);
    assert!(start.elapsed() < ms(400), "without a backoff: {:?}", start.elapsed());
    assert_eq!((a.in_flight(), b.in_flight()), (0, 0));
}

#[tokio::test]
async fn a_write_that_may_have_been_executed_stays() {
    let breaking = Server::start(|_, _| answer(500).body("who knows")).await;
    let other = Server::start(|_, _| answer(200)).await;
    let fleet = Fleet::local();
    let service = ladder!((fleet.provider("a"), &breaking.url), (fleet.provider("b"), &other.url));
    let mut write = request("http://placeholder.invalid/");
    write.extensions_mut().insert(Safety::Once);
    assert_eq!(whole(service, write).await.unwrap(), (500, "who knows".into()));
    assert_eq!((breaking.counts.calls(), other.counts.calls()), (1, 0));
}

#[tokio::test]
async fn the_last_real_reply_is_readable_and_stamped_after_the_retries_have_ended() {
    let server = Server::start(|n, _| answer(503).body(format!("busy {n}"))).await;
    let p = provider(4);
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new())
        .layer(JitteredRetryLayer::new().attempts(2).base(ms(20)))
        .layer(rung!(&p))
        .service(client());
    let reply = service.oneshot(request(&server.url)).await.unwrap();
    assert_eq!(reply.status(), 503);
    assert_eq!(p.in_flight(), 0, "an error reply holds no slot");
    let stamp = *reply.extensions().get::<Exhausted>().expect("stamped");
    assert_eq!(stamp.attempts, 2);
    assert_eq!(reply.into_body().collect().await.unwrap().to_bytes(), "busy 1");
    assert_eq!(server.counts.calls(), 2);
}

#[tokio::test]
async fn a_429_that_outlasts_the_deadline_is_returned_with_its_instant() {
    let server = Server::start(|_, _| answer(429).header("retry-after", 30).body("later")).await;
    let p = provider(4);
    let mut task = request(&server.url);
    task.extensions_mut().insert(Task::new(1).deadline_in(Duration::from_secs(5)));
    let start = Instant::now();
    let reply = stack!(&p, client()).oneshot(task).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(2), "at once: {:?}", start.elapsed());
    let stamp = *reply.extensions().get::<Exhausted>().expect("stamped");
    let wait = stamp.retry_at.expect("it said when").duration_since(start);
    assert!((30.0..47.0).contains(&wait.as_secs_f64()), "{wait:?}");
    assert_eq!((reply.status(), server.counts.calls()), (http::StatusCode::TOO_MANY_REQUESTS, 1));
    assert_eq!(reply.into_body().collect().await.unwrap().to_bytes(), "later");
}

#[tokio::test]
async fn a_server_that_closes_in_the_middle_of_a_body_leaves_no_slot_taken() {
    let server = Server::start(|n, _| match n {
        0 => answer(200).parts(3, ms(20)).breaks(),
        _ => answer(200),
    })
    .await;
    let p = provider(1);
    let service = stack!(&p, client());
    let broken = whole(service.clone(), request(&server.url)).await;
    assert!(broken.is_err(), "half an answer is none: {broken:?}");
    assert_eq!(p.in_flight(), 0);
    assert_eq!(whole(service, request(&server.url)).await.unwrap().0, 200);
}

#[tokio::test]
async fn calls_cancelled_at_any_point_leave_nothing_behind() {
    let servers = [
        Server::start(|n, _| match n % 7 {
            3 => answer(503),
            5 => answer(429).header("retry-after-ms", 40),
            _ => answer(200).after(ms(3)).parts(2, ms(3)),
        })
        .await,
        Server::start(|_, _| answer(200).after(ms(5)).parts(2, ms(2))).await,
    ];
    let fleet = Fleet::local();
    let settings = || ProviderSettings::new().ceiling(3);
    let (a, b) = (fleet.configure("a", settings()).unwrap(), fleet.configure("b", settings()).unwrap());
    let service = ladder!((a, &servers[0].url), (b, &servers[1].url));
    let calls: Vec<_> = (0..400u64)
        .map(|i| {
            let call = whole(service.clone(), request("http://placeholder.invalid/"));
            let after = Duration::from_micros(i * 150);
            tokio::spawn(async move { timeout(after, call).await.is_ok() })
        })
        .collect();
    for call in calls {
        call.await.unwrap();
    }
    settled(&a).await;
    settled(&b).await;
    assert!(a.ceiling() >= 1 && b.ceiling() >= 1);
    let last = timeout(Duration::from_secs(5), whole(service, request("http://placeholder.invalid/"))).await;
    assert_eq!(last.expect("nobody is stuck").unwrap().0, 200);
    for server in &servers {
        let deadline = Instant::now() + Duration::from_secs(5);
        while server.counts.running() > 0 {
            assert!(Instant::now() < deadline, "{} calls still run", server.counts.running());
            sleep(ms(5)).await;
        }
    }
}

#[tokio::test]
async fn two_ladders_share_the_ceilings_of_their_providers() {
    let servers = [
        Server::start(|_, _| answer(200).after(ms(10))).await,
        Server::start(|_, _| answer(200).after(ms(10))).await,
    ];
    let fleet = Fleet::local();
    let settings = || ProviderSettings::new().ceiling(2);
    let (a, b) = (fleet.configure("a", settings()).unwrap(), fleet.configure("b", settings()).unwrap());
    let one = ladder!((a, &servers[0].url), (b, &servers[1].url));
    let two = ladder!((b, &servers[1].url), (a, &servers[0].url));
    let calls: Vec<_> = (0..80)
        .map(|i| {
            let ladder = if i % 2 == 0 { one.clone() } else { two.clone() };
            tokio::spawn(whole(ladder, request("http://placeholder.invalid/")))
        })
        .collect();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().0, 200);
    }
    for (server, provider) in servers.iter().zip([&a, &b]) {
        assert_eq!(server.counts.peak(), 2, "used whole, and never above");
        assert_eq!((provider.in_flight(), provider.waiting()), (0, 0));
    }
    assert_eq!(servers[0].counts.calls() + servers[1].counts.calls(), 80);
}

#[tokio::test]
async fn a_ladder_and_a_direct_user_of_one_provider_do_not_starve_each_other() {
    let server = Server::start(|_, _| answer(200).after(ms(5))).await;
    let p = provider(2);
    let direct = stack!(&p, client());
    let ladder = ladder!((p, &server.url));
    let until = Instant::now() + ms(1500);
    let count = |n: usize| (0..n).map(|_| Arc::new(AtomicUsize::new(0))).collect::<Vec<_>>();
    let (by_ladder, by_direct) = (count(8), count(8));
    let mut agents = Vec::new();
    for done in &by_ladder {
        let (done, service, request) = (done.clone(), ladder.clone(), request("http://placeholder.invalid/"));
        agents.push(tokio::spawn(async move {
            while Instant::now() < until {
                whole(service.clone(), request.clone()).await.unwrap();
                done.fetch_add(1, SeqCst);
            }
        }));
    }
    for done in &by_direct {
        let (done, service, request) = (done.clone(), direct.clone(), request(&server.url));
        agents.push(tokio::spawn(async move {
            while Instant::now() < until {
                whole(service.clone(), request.clone()).await.unwrap();
                done.fetch_add(1, SeqCst);
            }
        }));
    }
    for agent in agents {
        agent.await.unwrap();
    }
    let sum = |counts: &[Arc<AtomicUsize>]| counts.iter().map(|n| n.load(SeqCst)).sum::<usize>();
    let (ladder, direct) = (sum(&by_ladder), sum(&by_direct));
    let share = ladder as f64 / (ladder + direct) as f64;
    assert!((0.35..0.65).contains(&share), "ladder {ladder}, direct {direct}");
    let least = by_ladder.iter().chain(&by_direct).map(|n| n.load(SeqCst)).min().unwrap();
    assert!(least > (ladder + direct) / 64, "one agent had {least} of {}", ladder + direct);
    assert_eq!((server.counts.peak(), p.in_flight(), p.waiting()), (2, 0, 0));
}

#[tokio::test]
async fn a_refusal_is_found_in_the_error_and_becomes_a_reply() {
    let server = Server::start(|_, _| answer(429).header("retry-after", 20)).await;
    let p = provider(2);
    let service = ServiceBuilder::new()
        .layer(RetryAfterLayer::new(&p).patience(ms(100)))
        .layer(FleetLimitLayer::new(&p))
        .layer(ClassifyLayer::new(&p))
        .service(client());
    assert_eq!(whole(service.clone(), request(&server.url)).await.unwrap().0, 429);
    let error = service.oneshot(request(&server.url)).await.unwrap_err();
    let refusal = Refusal::find(&*error).expect("a refusal");
    assert_eq!(refusal.kind, RefusalKind::Paused);
    let reply = refusal.to_response::<Full<Bytes>>();
    assert_eq!(reply.status(), 429);
    let seconds: u64 = reply.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((18..=20).contains(&seconds), "{seconds}");
    assert_eq!(server.counts.calls(), 1, "nothing was sent");
}

/// First a 429 that says 1 s, then successes: each arrival after the first must be a second late.
async fn learns_alone<S, B>(server: &Server, p: &Provider, service: S)
where
    S: Service<Request, Response = http::Response<B>, Error: Into<BoxError>> + Clone,
    B: http_body::Body<Error: Into<BoxError>>,
{
    assert_eq!(whole(service.clone(), request(&server.url)).await.unwrap().0, 429);
    assert_eq!(p.throttled(), 1, "counted once");
    assert!(p.paused_until().is_some());
    assert_eq!(whole(service, request(&server.url)).await.unwrap().0, 200);
    let times = server.counts.times();
    assert!(times[1] - times[0] >= Duration::from_secs(1), "{:?}", times[1] - times[0]);
    assert_eq!((p.in_flight(), p.waiting(), p.throttled()), (0, 0, 1));
}

async fn throttles_once() -> Server {
    Server::start(|n, _| match n {
        0 => answer(429).header("retry-after", 1),
        _ => answer(200),
    })
    .await
}

#[tokio::test]
async fn the_pause_alone_learns_without_a_sensor() {
    let (server, p) = (throttles_once().await, provider(4));
    let service = ServiceBuilder::new().layer(RetryAfterLayer::new(&p)).service(client());
    learns_alone(&server, &p, service).await;
}

// Its queue is not served while the provider is paused.
#[tokio::test]
async fn the_limit_alone_learns_without_a_sensor() {
    let (server, p) = (throttles_once().await, provider(4));
    let service = ServiceBuilder::new().layer(FleetLimitLayer::new(&p)).service(client());
    learns_alone(&server, &p, service).await;
}

#[tokio::test]
async fn two_gates_without_a_sensor_do_not_count_a_429_twice() {
    let (server, p) = (throttles_once().await, provider(4));
    let service = ServiceBuilder::new()
        .layer(RetryAfterLayer::new(&p))
        .layer(FleetLimitLayer::new(&p))
        .service(client());
    learns_alone(&server, &p, service).await;
}

#[tokio::test]
async fn a_sensor_and_two_gates_count_a_429_once() {
    let (server, p) = (throttles_once().await, provider(4));
    let service = ServiceBuilder::new().layer(rung!(&p)).service(client());
    learns_alone(&server, &p, service).await;
}

// A foreign layer that calls the rest of the stack later, and on another task.
#[tokio::test]
async fn a_buffer_between_the_gates_changes_nothing() {
    let (server, p) = (throttles_once().await, provider(4));
    let service = ServiceBuilder::new()
        .layer(RetryAfterLayer::new(&p))
        .layer(BufferLayer::new(64))
        .layer(FleetLimitLayer::new(&p))
        .layer(ClassifyLayer::new(&p))
        .service(client());
    learns_alone(&server, &p, service).await;
}

#[tokio::test]
async fn a_ladder_over_buffered_rungs_is_never_above_the_ceiling() {
    let server = Server::start(|n, _| match n {
        20 => answer(429).header("retry-after-ms", 300),
        _ => answer(200).after(ms(3)),
    })
    .await;
    let p = provider(3);
    let layers = ServiceBuilder::new()
        .layer(BufferLayer::new(64))
        .layer(RetryAfterLayer::new(&p))
        .layer(BufferLayer::new(64))
        .layer(rung!(&p))
        .into_inner();
    let ladder = HashedFailoverLayer::new([Rung::new(&p, layers).map(to(&server.url))]).unwrap();
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new())
        .layer(JitteredRetryLayer::new())
        .layer(ladder)
        .service(client());
    let calls: Vec<_> = (0..120)
        .map(|_| tokio::spawn(whole(service.clone(), request("http://placeholder.invalid/"))))
        .collect();
    for call in calls {
        let call = timeout(Duration::from_secs(30), call).await.expect("nobody is stuck");
        assert_eq!(call.unwrap().unwrap().0, 200);
    }
    assert!(server.counts.peak() <= 3, "{}", server.counts.peak());
    assert_eq!((p.throttled(), server.counts.calls()), (1, 121));
    settled(&p).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_time_twenty_thousand_calls_over_sockets_are_never_above_the_ceiling() {
    let server = Server::start(|n, _| if n % 997 == 996 { answer(503) } else { answer(200) }).await;
    let p = provider(8);
    let service = stack!(&p, client());
    let next = Arc::new(AtomicUsize::new(0));
    let agents: Vec<_> = (0..40)
        .map(|_| {
            let (service, url, next) = (service.clone(), server.url.clone(), next.clone());
            tokio::spawn(async move {
                while next.fetch_add(1, SeqCst) < 20_000 {
                    whole(service.clone(), request(&url)).await.unwrap();
                }
            })
        })
        .collect();
    for agent in agents {
        timeout(Duration::from_secs(240), agent).await.expect("nobody is stuck").unwrap();
    }
    assert!(server.counts.peak() <= 8, "{}", server.counts.peak());
    assert_eq!((p.in_flight(), p.waiting()), (0, 0));
}

/// The same without sockets, where the calls change hands much more often.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_time_a_hundred_thousand_calls_on_two_threads_are_never_above_the_ceiling() {
    const CALLS: usize = 100_000;
    let (running, peak) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let served = {
        let (running, peak) = (running.clone(), peak.clone());
        service_fn(move |_: Request| {
            let (running, peak) = (running.clone(), peak.clone());
            async move {
                peak.fetch_max(running.fetch_add(1, SeqCst) + 1, SeqCst);
                tokio::task::yield_now().await;
                running.fetch_sub(1, SeqCst);
                Ok::<_, Infallible>(http::Response::new(Full::<Bytes>::default()))
            }
        })
    };
    let p = provider(5);
    let service = stack!(&p, served);
    let next = Arc::new(AtomicUsize::new(0));
    let agents: Vec<_> = (0..64)
        .map(|_| {
            let (service, next) = (service.clone(), next.clone());
            tokio::spawn(async move {
                while next.fetch_add(1, SeqCst) < CALLS {
                    assert_eq!(whole(service.clone(), request("http://a.invalid/")).await.unwrap().0, 200);
                }
            })
        })
        .collect();
    for agent in agents {
        timeout(Duration::from_secs(240), agent).await.expect("nobody is stuck").unwrap();
    }
    assert_eq!((running.load(SeqCst), p.in_flight(), p.waiting()), (0, 0, 0));
    assert!(peak.load(SeqCst) <= 5, "{}", peak.load(SeqCst));
}
