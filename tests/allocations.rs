//! How often a call that meets no trouble allocates: never, where nothing is said below.
//!
//! Counted on the thread of the call, from `poll_ready` to the end of the reply's body, after a few calls
//! to warm up. Errors and waits may allocate; nobody counts these.

use allocation_counter::measure;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use std::{
    convert::Infallible,
    error::Error,
    future::{Future, Ready, ready},
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, util::BoxCloneSyncService};
use tower_herd::{
    AttemptTimeoutLayer, AttemptsLayer, BoxError, BreakerLayer, BudgetLayer, Classify, ClassifyLayer, Fleet,
    FleetLimitLayer, HashedFailover, Herd, JitteredRetryLayer, Kind, Mode, Provider, ProviderSettings,
    RampedReadmissionLayer, RetryAfterLayer, Signal, SpendLayer, Switch, Task, TaskLayer, TokenLimitLayer,
    failover::Rung,
    readmission::Profile,
    retry_token::{JobBreakerLayer, LocalTokens, RetryTokenLayer, Tokens},
    spend::{Allowance, Amount, Prices},
    usage::{llm, of_reply},
};

// ------------------------------------------------------------------------------ requests and replies

trait Sample {
    fn make() -> Self;
}

impl Sample for u64 {
    fn make() -> Self {
        7
    }
}

/// Its URI and its body can be cloned without a copy; it has no headers and no extensions, since a map of
/// these is copied by every clone.
type HttpRequest = http::Request<Full<Bytes>>;

impl Sample for HttpRequest {
    fn make() -> Self {
        let mut request = http::Request::new(Full::from("{}"));
        *request.method_mut() = http::Method::POST;
        request
    }
}

trait Consume {
    fn consume(self);
}

impl Consume for u64 {
    fn consume(self) {
        assert_eq!(self, 7);
    }
}

impl<B: http_body::Body> Consume for http::Response<B> {
    fn consume(self) {
        let mut body = pin!(self.into_body());
        assert!(now(body.as_mut().frame()).is_some_and(|frame| frame.is_ok()));
        assert!(now(body.as_mut().frame()).is_none());
    }
}

fn now<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("nothing here waits"),
    }
}

/// Ready at once. What the making of a reply allocates is not ours, and is not counted.
#[derive(Clone, Copy, Debug)]
struct Inner;

impl Service<u64> for Inner {
    type Response = u64;
    type Error = Infallible;
    type Future = Ready<Result<u64, Infallible>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, request: u64) -> Self::Future {
        ready(Ok(request))
    }
}

impl Service<HttpRequest> for Inner {
    type Response = http::Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, _: HttpRequest) -> Self::Future {
        let mut reply = None;
        allocation_counter::opt_out(|| reply = Some(reply_with_headers()));
        ready(Ok(reply.expect("just made")))
    }
}

fn reply_with_headers() -> http::Response<Full<Bytes>> {
    let mut reply = http::Response::builder();
    for (name, value) in [
        ("date", "Tue, 14 Nov 2023 22:13:50 GMT"),
        ("content-type", "application/json"),
        ("content-length", "2"),
        ("server", "cloudflare"),
        ("x-request-id", "req_1"),
        ("cache-control", "no-cache"),
        ("vary", "Accept-Encoding"),
        ("x-envoy-upstream-service-time", "250"),
        ("openai-version", "2020-10-01"),
        ("openai-processing-ms", "241"),
        ("alt-svc", "h3=\":443\""),
        ("strict-transport-security", "max-age=1"),
    ] {
        reply = reply.header(name, value);
    }
    reply.body(Full::from("{}")).expect("headers are valid")
}

/// A number is a success, whichever it is.
#[derive(Clone, Copy, Debug)]
struct Numbers;

impl Classify<u64> for Numbers {
    fn classify(&self, outcome: Result<&u64, &(dyn Error + 'static)>) -> Signal {
        Signal::new(if outcome.is_ok() { Kind::Success } else { Kind::Failed })
    }
}

// ------------------------------------------------------------------------------------------- counting

const CALLS: u64 = 200;

/// Allocations a call, of a service that is used as it is.
fn count<Req, S>(service: S) -> f64
where
    Req: Sample,
    S: Service<Req, Response: Consume, Error: std::fmt::Debug>,
{
    count_of(service, Req::make)
}

fn count_of<Req, S>(mut service: S, make: impl Fn() -> Req) -> f64
where
    S: Service<Req, Response: Consume, Error: std::fmt::Debug>,
{
    let mut call = |request| {
        let ready = service.poll_ready(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(ready, Poll::Ready(Ok(()))));
        now(service.call(request)).expect("nothing here fails").consume();
    };
    // The first calls meet an empty thread, an empty queue and a clock that was never read.
    (0..CALLS).for_each(|_| call(make()));
    let mut counted = 0;
    for _ in 0..CALLS {
        // The request is the caller's.
        let request = make();
        counted += measure(|| call(request)).count_total;
    }
    counted as f64 / CALLS as f64
}

/// The same where each call clones the service, as servers do.
fn count_cloned<Req, S>(service: &S) -> f64
where
    Req: Sample,
    S: Service<Req, Response: Consume, Error: std::fmt::Debug> + Clone,
{
    let cloning = tower::service_fn(|request: Req| {
        let mut service = service.clone();
        let ready = service.poll_ready(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(ready, Poll::Ready(Ok(()))));
        service.call(request)
    });
    count(cloning)
}

fn providers() -> [Provider; 3] {
    let fleet = Fleet::local();
    let configured = fleet.configure("configured", ProviderSettings::new().ceiling(64)).expect("valid");
    let scoped = configured.scope("model");
    [configured, scoped, fleet.provider("unconfigured")]
}

fn number_stack(
    provider: &Provider,
) -> impl Service<u64, Response = u64, Error = BoxError, Future: Send> + Clone + Send + Sync + use<> {
    ServiceBuilder::new()
        .layer(JitteredRetryLayer::new().classify(Numbers))
        .layer(BreakerLayer::new(provider).classify(Numbers))
        .layer(RampedReadmissionLayer::new(provider))
        .layer(BudgetLayer::new(provider).classify(Numbers))
        .layer(RetryAfterLayer::new(provider).classify(Numbers))
        .layer(FleetLimitLayer::new(provider).until_reply().classify(Numbers))
        .layer(ClassifyLayer::new(provider).classify(Numbers).replies())
        .layer(AttemptTimeoutLayer::new(Duration::from_secs(1)).replies())
        .service(Inner)
}

fn http_stack(
    provider: &Provider,
) -> impl Service<HttpRequest, Response = http::Response<impl http_body::Body + use<>>, Error = BoxError>
+ Clone
+ use<> {
    ServiceBuilder::new()
        .layer(JitteredRetryLayer::new())
        .layer(BreakerLayer::new(provider))
        .layer(RampedReadmissionLayer::new(provider))
        .layer(BudgetLayer::new(provider))
        .layer(RetryAfterLayer::new(provider))
        .layer(FleetLimitLayer::new(provider))
        .layer(AttemptsLayer::new(provider))
        .layer(ClassifyLayer::new(provider))
        .layer(AttemptTimeoutLayer::default())
        .service(Inner)
}

// ---------------------------------------------------------------------------------------------- layers

#[test]
fn each_layer_alone_with_plain_requests() {
    assert_eq!(count::<u64, _>(JitteredRetryLayer::new().classify(Numbers).layer(Inner)), 0.0);
    assert_eq!(count::<u64, _>(AttemptTimeoutLayer::new(Duration::from_secs(1)).replies().layer(Inner)), 0.0);
    for provider in providers() {
        assert_eq!(count::<u64, _>(BudgetLayer::new(&provider).classify(Numbers).layer(Inner)), 0.0);
        assert_eq!(count::<u64, _>(RetryAfterLayer::new(&provider).classify(Numbers).layer(Inner)), 0.0);
        let breaker = BreakerLayer::new(&provider).classify(Numbers);
        assert_eq!(count::<u64, _>(breaker.layer(Inner)), 0.0);
        let limit = FleetLimitLayer::new(&provider).until_reply().classify(Numbers);
        assert_eq!(count::<u64, _>(limit.layer(Inner)), 0.0);
        let sensor = ClassifyLayer::new(&provider).classify(Numbers).replies();
        assert_eq!(count::<u64, _>(sensor.layer(Inner)), 0.0);
        assert_eq!(count::<u64, _>(RampedReadmissionLayer::new(&provider).layer(Inner)), 0.0);
    }
}

#[test]
fn each_layer_alone_with_http() {
    assert_eq!(count::<HttpRequest, _>(JitteredRetryLayer::new().layer(Inner)), 0.0);
    assert_eq!(count::<HttpRequest, _>(AttemptTimeoutLayer::default().layer(Inner)), 0.0);
    for provider in providers() {
        assert_eq!(count::<HttpRequest, _>(BreakerLayer::new(&provider).layer(Inner)), 0.0);
        assert_eq!(count::<HttpRequest, _>(BudgetLayer::new(&provider).layer(Inner)), 0.0);
        assert_eq!(count::<HttpRequest, _>(RetryAfterLayer::new(&provider).layer(Inner)), 0.0);
        assert_eq!(count::<HttpRequest, _>(FleetLimitLayer::new(&provider).layer(Inner)), 0.0);
        assert_eq!(count::<HttpRequest, _>(ClassifyLayer::new(&provider).layer(Inner)), 0.0);
        assert_eq!(count::<HttpRequest, _>(RampedReadmissionLayer::new(&provider).layer(Inner)), 0.0);
        assert_eq!(count::<HttpRequest, _>(AttemptsLayer::new(&provider).layer(Inner)), 0.0);
    }
}

/// Spend caps and token limits in force; the body is read for what it tells.
#[test]
fn what_counts_money_and_tokens() {
    let settings = ProviderSettings::new().ceiling(64).tokens_per_minute(u32::MAX);
    let provider = &Fleet::local().configure("counted", settings).expect("valid");
    let month = Allowance::new(Amount::MAX);
    let price = Amount::units(1);
    let spend = SpendLayer::new(provider, move |_: &u64| price, of_reply(move |_: &u64| Some(price)));
    let spend = spend.within(&month).classify(Numbers);
    assert_eq!(count::<u64, _>(spend.layer(Inner)), 0.0);
    let tokens = TokenLimitLayer::with(provider, |_: &u64| 7_u64, of_reply(|used: &u64| Some(*used)));
    let tokens = tokens.classify(Numbers);
    assert_eq!(count::<u64, _>(tokens.layer(Inner)), 0.0);
    assert_eq!(count_cloned::<u64, _>(&spend.layer(tokens.layer(Inner))), 0.0);

    let spend = SpendLayer::new(provider, move |_: &HttpRequest| price, llm(Prices::new(price, price)));
    let tokens = TokenLimitLayer::new(provider);
    assert_eq!(count::<HttpRequest, _>(spend.clone().within(&month).layer(Inner)), 0.0);
    assert_eq!(count::<HttpRequest, _>(tokens.layer(Inner)), 0.0);
    let stack = spend.within(&month).layer(tokens.layer(FleetLimitLayer::new(provider).layer(Inner)));
    assert_eq!(count_cloned::<HttpRequest, _>(&stack), 0.0);
    // By task: its allowance, and its share here, which is made once.
    let one = Task::new(1).spend(Amount::MAX);
    let make = || {
        let mut request = HttpRequest::make();
        request.extensions_mut().insert(one.clone());
        request
    };
    let spend = SpendLayer::new(provider, move |_: &HttpRequest| price, llm(Prices::new(price, price)));
    assert_eq!(count_of(spend.per_task(Amount::MAX).layer(Inner), make), 0.0);
    assert!(one.spend_allowance().is_some_and(|allowance| allowance.spent() > Amount::ZERO));
}

/// Tokens in memory: a job that passes, and one that is granted and succeeds. Its key is the caller's; one that is
/// made for the call is one allocation, and that is the caller's too.
#[test]
fn retry_tokens() {
    let tokens = Tokens::new("jobs", LocalTokens::new());
    let none = RetryTokenLayer::new(&tokens, |_: &u64| None::<Arc<str>>, |_: &u64| 1);
    assert_eq!(count::<u64, _>(none.layer(Inner)), 0.0);
    let key: Arc<str> = "job".into();
    let granted = RetryTokenLayer::new(&tokens, move |_: &u64| Some(key.clone()), |_: &u64| 1);
    assert_eq!(count::<u64, _>(granted.layer(Inner)), 0.0);
    let made = RetryTokenLayer::new(&tokens, |_: &u64| Some("job"), |_: &u64| 1);
    assert_eq!(count::<u64, _>(made.layer(Inner)), 1.0);
    let breaker = JobBreakerLayer::new(&tokens, |_: &u64| Some("crm"));
    assert_eq!(count::<u64, _>(breaker.layer(Inner)), 0.0);
    assert_eq!(tokens.counts().granted, 4 * CALLS);
}

#[test]
fn the_whole_stack() {
    for provider in providers() {
        let (plain, http) = (number_stack(&provider), http_stack(&provider));
        assert_eq!(count::<u64, _>(plain.clone()), 0.0, "{provider:?}");
        assert_eq!(count::<HttpRequest, _>(http.clone()), 0.0, "{provider:?}");
        assert_eq!(count_cloned::<u64, _>(&plain), 0.0, "{provider:?}");
        assert_eq!(count_cloned::<HttpRequest, _>(&http), 0.0, "{provider:?}");
    }
}

/// Nor does a call that a ramp lets in.
#[tokio::test(start_paused = true)]
async fn a_call_that_is_readmitted() {
    for provider in providers() {
        let profile = Profile::slow_start(Duration::from_secs(60));
        let ramp = RampedReadmissionLayer::new(&provider).profile(profile).expect("valid");
        provider.pause_for(Duration::from_secs(600));
        tokio::time::advance(Duration::from_secs(600)).await;
        // The first one begins the ramp; after half of the time about half of the keys are back.
        drop(ramp.layer(Inner).oneshot(HttpRequest::make()).await);
        tokio::time::advance(Duration::from_secs(30)).await;
        let request = |task: &Task| {
            let mut request = HttpRequest::make();
            request.extensions_mut().insert(task.clone());
            request
        };
        let mut task = None;
        for key in 0..100u64 {
            let candidate = Task::new(key);
            if ramp.layer(Inner).oneshot(request(&candidate)).await.is_ok() {
                task = Some(candidate);
            }
        }
        let task = task.expect("half of a hundred");
        assert!((0.4..0.6).contains(&provider.readmitted()));
        assert_eq!(count_of(ramp.layer(Inner), || request(&task)), 0.0, "{provider:?}");
    }
}

/// Whichever way it is switched; and where it only observes, whoever it would have held back, too.
#[test]
fn the_whole_stack_in_every_mode() {
    for mode in [Mode::Enforce, Mode::Observe, Mode::Off] {
        let fleet = Fleet::local();
        let provider = fleet.configure("p", ProviderSettings::new().ceiling(1)).expect("valid");
        let switch = Switch::new(mode);
        let service = ServiceBuilder::new()
            .layer(JitteredRetryLayer::new().switch(&switch))
            .layer(RetryAfterLayer::new(&provider).switch(&switch))
            .layer(FleetLimitLayer::new(&provider).switch(&switch))
            .layer(ClassifyLayer::new(&provider).switch(&switch))
            .layer(AttemptTimeoutLayer::default().switch(&switch))
            .service(Inner);
        assert_eq!(count::<HttpRequest, _>(service.clone()), 0.0, "{mode:?}");
        assert_eq!(count_cloned::<HttpRequest, _>(&service), 0.0, "{mode:?}");
        if mode == Mode::Observe {
            let held = now(service.clone().oneshot(HttpRequest::make())).expect("nothing here fails");
            assert_eq!((provider.in_flight(), switch.would_refuse()), (1, 0));
            assert_eq!(count::<HttpRequest, _>(service), 0.0, "without a slot");
            assert_eq!((provider.in_flight(), switch.would_refuse()), (1, 2 * CALLS));
            drop(held);
        }
    }
}

/// All of it in one: neither does a herd allocate, with a task or without.
#[test]
fn the_whole_stack_from_one_builder() {
    for provider in providers() {
        let herd = Herd::new(&provider).layer(Inner);
        assert_eq!(count::<HttpRequest, _>(herd.clone()), 0.0, "{provider:?}");
        assert_eq!(count_cloned::<HttpRequest, _>(&herd), 0.0, "{provider:?}");
        let task = Task::new(1);
        let make = || {
            let mut request = HttpRequest::make();
            request.extensions_mut().insert(task.clone());
            request
        };
        let clone = {
            let kept = make();
            measure(|| drop(kept.clone())).count_total
        };
        assert_eq!(count_of(herd, make), clone as f64, "the clone that is kept");
    }
}

/// What a request carries is copied with it: its clone is all that a stack adds.
#[test]
fn a_request_that_is_kept_costs_its_clone() {
    let make = || {
        let mut request = HttpRequest::make();
        request.headers_mut().insert("authorization", http::HeaderValue::from_static("Bearer x"));
        request.extensions_mut().insert(Task::new(1));
        request
    };
    let kept = make();
    let clone = measure(|| drop(kept.clone())).count_total;
    assert!(clone > 0);
    let [provider, ..] = providers();
    let stack = http_stack(&provider);
    assert_eq!(count_of(stack, make), clone as f64);
}

// ------------------------------------------------------------------------- what allocates, and how much

/// Four when it starts a task: the task itself, and three that the `http` crate makes to put the first
/// extension into a request. None where the request has one.
#[test]
fn the_task_layer_allocates_only_when_it_starts_a_task() {
    let starts = count::<HttpRequest, _>(TaskLayer::new().layer(Inner));
    let one = Task::new(1);
    let make = || {
        let mut request = HttpRequest::make();
        request.extensions_mut().insert(one.clone());
        request
    };
    assert_eq!(count_of(TaskLayer::new().layer(Inner), make), 0.0);
    let by_hand = {
        let mut request = HttpRequest::make();
        measure(|| drop(request.extensions_mut().insert(Task::new(1)))).count_total
    };
    assert_eq!(starts, by_hand as f64, "the task and its place in the request, nothing else");
    assert_eq!(by_hand, 4);
}

/// Where that was asked for: one, the value of our header. The count of Envoy's dialect is a static text. (The map
/// of headers grows where it is full.)
#[tokio::test(start_paused = true)]
async fn telling_a_first_call_what_is_left_allocates_its_header() {
    let [provider, ..] = &providers();
    let task = Task::new(1).deadline_in(Duration::from_secs(7));
    let make = || {
        let mut request = HttpRequest::make();
        request.headers_mut().reserve(8);
        request.extensions_mut().insert(task.clone());
        request
    };
    assert_eq!(count_of(AttemptsLayer::new(provider).tell_first(true).layer(Inner), make), 1.0);
    assert_eq!(count_of(AttemptsLayer::new(provider).tell_first(true).own(false).layer(Inner), make), 0.0);
}

#[test]
fn a_ladder_of_like_rungs() {
    let [first, _, second] = providers();
    let rungs = [&first, &second].map(|provider| Rung::new(provider, number_stack(provider)));
    let ladder = HashedFailover::new(rungs).expect("valid rungs").classify(Numbers);
    assert_eq!(count::<u64, _>(ladder), 0.0);
    let rungs = [&first, &second].map(|provider| Rung::new(provider, http_stack(provider)));
    let ladder = HashedFailover::new(rungs).expect("valid rungs");
    assert_eq!(count::<HttpRequest, _>(ladder), 0.0);
}

/// Rungs of different types are boxed: their future is one allocation. The service that made a call makes the
/// next one too, and is not cloned.
#[test]
fn a_ladder_of_boxed_rungs() {
    let [first, _, second] = providers();
    let other = FleetLimitLayer::new(&second).until_reply().classify(Numbers).layer(Inner);
    let rungs = [
        Rung::new(&first, BoxCloneSyncService::new(number_stack(&first))),
        Rung::new(&second, BoxCloneSyncService::new(other)),
    ];
    let ladder = HashedFailover::new(rungs).expect("valid rungs").classify(Numbers);
    assert_eq!(count::<u64, _>(ladder), 1.0);
}

/// A call that has to wait for its reply allocates the timer of its attempt, and nothing else.
#[tokio::test(start_paused = true)]
async fn a_call_that_waits_for_its_reply() {
    let [provider, ..] = &providers();
    let mut service = ServiceBuilder::new()
        .layer(JitteredRetryLayer::new().classify(Numbers))
        .layer(RetryAfterLayer::new(provider).classify(Numbers))
        .layer(FleetLimitLayer::new(provider).until_reply().classify(Numbers))
        .layer(ClassifyLayer::new(provider).classify(Numbers).replies())
        .layer(AttemptTimeoutLayer::new(Duration::from_secs(1)).replies())
        .service(tower::service_fn(|_: u64| std::future::pending::<Result<u64, Infallible>>()));
    assert_eq!(number_stack(provider).oneshot(7).await.expect("nothing fails"), 7);
    let mut call = pin!(service.call(7));
    let mut cx = Context::from_waker(Waker::noop());
    let info = measure(|| assert!(call.as_mut().poll(&mut cx).is_pending()));
    assert_eq!(info.count_total, 1);
}

/// So does a herd: one timer, and another where its body is waited for.
#[tokio::test(start_paused = true)]
async fn a_call_of_a_herd_that_waits_for_its_reply() {
    let [provider, ..] = &providers();
    let herd = Herd::new(provider);
    drop(herd.layer(Inner).oneshot(HttpRequest::make()).await.expect("nothing fails"));
    let never = tower::service_fn(|_: HttpRequest| {
        std::future::pending::<Result<http::Response<Full<Bytes>>, Infallible>>()
    });
    let mut service = herd.layer(never);
    let mut call = pin!(service.call(HttpRequest::make()));
    let mut cx = Context::from_waker(Waker::noop());
    let info = measure(|| assert!(call.as_mut().poll(&mut cx).is_pending()));
    assert_eq!(info.count_total, 1);
}
