//! What each layer adds to a call that meets no trouble, beside tower's layers and tower-resilience's.
//!
//! ```text
//! cargo bench --bench overhead --features peers             # all, and the table at the end
//! cargo bench --bench overhead --features peers -- http/    # only these; the table shows what ran
//! ```
//!
//! The inner service is ready at once, so a call is one `poll_ready`, one `call`, one `poll` and, for
//! HTTP, reading the body to its end. Every figure of the table is what the layers add to that. The
//! request of `http` is a `POST` with a body, and its clone is counted where a layer keeps one; the
//! reply has 12 headers and 512 bytes.
//!
//! Times depend on the machine and on who else uses it. The ratios of one run are what to look at.

use bytes::Bytes;
use criterion::{Bencher, Criterion};
use http_body::Body;
use http_body_util::Full;
use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    convert::Infallible,
    error::Error,
    future::{Future, Ready, ready},
    hint::black_box,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};
use tower::{Layer, Service, ServiceBuilder};
use tower_herd::{
    AttemptsLayer, BreakerLayer, BudgetLayer, Classify, ClassifyLayer, Fleet, FleetLimitLayer, Herd,
    JitteredRetryLayer, Kind, Provider, ProviderSettings, RampedReadmissionLayer, RetryAfterLayer, Signal,
    SpendLayer, TokenLimitLayer,
    spend::{Allowance, Amount, Prices},
    usage::{llm, of_reply},
};

// ------------------------------------------------------------------------------ requests and replies

/// What is sent, and how its reply is used up.
trait Sample {
    type Reply;
    fn make() -> Self;
}

impl Sample for u64 {
    type Reply = u64;
    fn make() -> Self {
        black_box(7)
    }
}

type HttpRequest = http::Request<Full<Bytes>>;
type HttpReply = http::Response<Full<Bytes>>;

impl Sample for HttpRequest {
    type Reply = HttpReply;
    fn make() -> Self {
        let mut request = http::Request::new(Full::new(Bytes::from_static(b"{\"prompt\":\"hello\"}")));
        *request.method_mut() = http::Method::POST;
        request
    }
}

/// The caller reads the reply to its end.
trait Consume {
    fn consume(self, cx: &mut Context<'_>);
}

impl Consume for u64 {
    fn consume(self, _: &mut Context<'_>) {
        black_box(self);
    }
}

impl<B: Body> Consume for http::Response<B> {
    fn consume(self, cx: &mut Context<'_>) {
        let (parts, body) = self.into_parts();
        {
            let mut body = pin!(body);
            while let Poll::Ready(Some(frame)) = body.as_mut().poll_frame(cx) {
                black_box(frame.is_ok());
            }
        }
        // The head serves the next reply too: building one costs more than all layers together.
        SPARE.set(Some(http::Response::from_parts(parts, reply_body())));
    }
}

thread_local! {
    static SPARE: Cell<Option<HttpReply>> = const { Cell::new(None) };
}

fn reply_body() -> Full<Bytes> {
    static BODY: [u8; 512] = [b'x'; 512];
    Full::new(Bytes::from_static(&BODY))
}

#[cold]
fn new_reply() -> HttpReply {
    let headers = [
        ("date", "Tue, 14 Nov 2023 22:13:50 GMT"),
        ("content-type", "application/json"),
        ("content-length", "512"),
        ("server", "cloudflare"),
        ("x-request-id", "req_1"),
        ("cache-control", "no-cache"),
        ("vary", "Accept-Encoding"),
        ("x-envoy-upstream-service-time", "250"),
        ("openai-version", "2020-10-01"),
        ("openai-processing-ms", "241"),
        ("alt-svc", "h3=\":443\""),
        ("strict-transport-security", "max-age=1"),
    ];
    let reply =
        headers.iter().fold(http::Response::builder(), |reply, (name, value)| reply.header(*name, *value));
    reply.body(reply_body()).expect("headers are valid")
}

/// Ready at once.
#[derive(Clone, Copy, Debug)]
struct Inner;

impl Service<u64> for Inner {
    type Response = u64;
    type Error = Infallible;
    type Future = Ready<Result<u64, Infallible>>;
    #[inline]
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }
    #[inline(never)]
    fn call(&mut self, request: u64) -> Self::Future {
        ready(Ok(black_box(request)))
    }
}

impl Service<HttpRequest> for Inner {
    type Response = HttpReply;
    type Error = Infallible;
    type Future = Ready<Result<HttpReply, Infallible>>;
    #[inline]
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }
    #[inline(never)]
    fn call(&mut self, request: HttpRequest) -> Self::Future {
        black_box(&request);
        ready(Ok(SPARE.take().unwrap_or_else(new_reply)))
    }
}

#[inline]
fn one_call<Req: Sample, S: Service<Req, Response: Consume>>(service: &mut S, cx: &mut Context<'_>) {
    assert!(service.poll_ready(cx).is_ready(), "the inner service is always ready");
    let reply = {
        let future = pin!(service.call(Req::make()));
        match future.poll(cx) {
            Poll::Ready(reply) => reply,
            Poll::Pending => panic!("nothing here waits"),
        }
    };
    match reply {
        Ok(reply) => reply.consume(cx),
        Err(_) => panic!("nothing here fails"),
    }
}

// ------------------------------------------------------------------------------------------ measuring

/// Nanoseconds a call, each sample, by scenario.
#[derive(Default)]
struct Samples(RefCell<BTreeMap<String, Vec<f64>>>);

impl Samples {
    fn add(&self, name: &str, calls: u64, took: Duration) {
        let nanos = took.as_nanos() as f64 / calls as f64;
        self.0.borrow_mut().entry(name.to_owned()).or_default().push(nanos);
    }

    /// The fast tenth: what others do on the machine only ever adds.
    fn nanos(&self, name: &str) -> Option<f64> {
        let samples = self.0.borrow();
        let mut samples = samples.get(name)?.clone();
        samples.sort_by(f64::total_cmp);
        Some(samples[samples.len() / 10])
    }
}

#[expect(clippy::disallowed_methods, reason = "a benchmark is about real time")]
fn timed(run: impl FnOnce()) -> Duration {
    let began = std::time::Instant::now();
    run();
    began.elapsed()
}

struct Bench<'a> {
    criterion: &'a mut Criterion,
    samples: &'a Samples,
}

impl Bench<'_> {
    fn run(&mut self, name: &str, mut run: impl FnMut(u64) -> Duration) {
        let samples = self.samples;
        self.criterion.bench_function(name, |bencher: &mut Bencher<'_>| {
            bencher.iter_custom(|calls| {
                let took = run(calls);
                samples.add(name, calls, took);
                took
            });
        });
    }

    fn calls<Req: Sample, S: Service<Req, Response: Consume>>(&mut self, name: &str, mut service: S) {
        self.run(name, |calls| {
            let mut cx = Context::from_waker(Waker::noop());
            timed(|| (0..calls).for_each(|_| one_call(&mut service, &mut cx)))
        });
    }
}

// -------------------------------------------------------------------------------------- tower's layers

/// Clones every request and never repeats one: what a retry costs when nothing fails.
#[derive(Clone, Copy, Debug)]
struct NeverAgain;

impl<Req: Clone, Res, E> tower::retry::Policy<Req, Res, E> for NeverAgain {
    type Future = Ready<()>;
    fn retry(&mut self, _: &mut Req, _: &mut Result<Res, E>) -> Option<Ready<()>> {
        None
    }
    fn clone_request(&mut self, request: &Req) -> Option<Req> {
        Some(request.clone())
    }
}

fn towers<Req>(bench: &mut Bench<'_>, prefix: &str)
where
    Req: Sample + Clone,
    Inner: Service<Req, Response: Consume>,
{
    let retry = tower::retry::RetryLayer::new(NeverAgain);
    let limit = tower::limit::ConcurrencyLimitLayer::new(64);
    bench.calls::<Req, _>(&format!("{prefix}/inner"), Inner);
    bench.calls::<Req, _>(&format!("{prefix}/tower/retry"), retry.layer(Inner));
    bench.calls::<Req, _>(&format!("{prefix}/tower/limit"), limit.layer(Inner));
    bench.calls::<Req, _>(&format!("{prefix}/tower/stack"), retry.layer(limit.layer(Inner)));
}

// --------------------------------------------------------------------------- tower-resilience's layers

#[cfg(feature = "peers")]
fn peers<Req>(bench: &mut Bench<'_>, prefix: &str)
where
    Req: Sample + Clone + Send + Sync + 'static,
    Inner: Service<Req, Response = Req::Reply, Error = Infallible, Future: Send + 'static>,
    Req::Reply: Consume + Send + Sync + 'static,
{
    use tower_resilience::{
        bulkhead::{BulkheadLayer, BulkheadServiceError},
        circuitbreaker::{CircuitBreakerError, CircuitBreakerLayer},
        ratelimiter::{RateLimiterLayer, RateLimiterServiceError},
        retry::{RetryBudgetBuilder, RetryLayer},
    };
    const MANY: usize = 1 << 40;
    fn retry<Req, Res, E>() -> RetryLayer<Req, Res, E>
    where
        Req: Clone + Send + 'static,
        Res: Send + 'static,
        E: Send + 'static,
    {
        let budget = RetryBudgetBuilder::new().token_bucket().build().expect("its defaults are valid");
        RetryLayer::builder().max_attempts(3).budget(budget).build()
    }
    let pace = RateLimiterLayer::builder().limit_for_period(MANY).refresh_period(Duration::from_secs(1));
    let pace = pace.build().expect("valid");
    let limit = BulkheadLayer::builder().max_concurrent_calls(64).build().expect("valid");
    bench.calls::<Req, _>(&format!("{prefix}/peer/retry"), retry::<Req, _, _>().layer(Inner));
    bench.calls::<Req, _>(&format!("{prefix}/peer/pause"), pace.layer(Inner));
    bench.calls::<Req, _>(&format!("{prefix}/peer/limit"), limit.layer(Inner));
    type StackError = RateLimiterServiceError<BulkheadServiceError<Infallible>>;
    let stack = retry::<Req, Req::Reply, StackError>().layer(pace.layer(limit.layer(Inner)));
    bench.calls::<Req, _>(&format!("{prefix}/peer/stack"), stack);
    let breaker = CircuitBreakerLayer::builder().build().expect("its defaults are valid");
    let stack = retry::<Req, Req::Reply, CircuitBreakerError<StackError>>()
        .layer(breaker.layer(pace.layer(limit.layer(Inner))));
    bench.calls::<Req, _>(&format!("{prefix}/peer/stack with breaker"), stack);
}

#[cfg(not(feature = "peers"))]
fn peers<Req>(_: &mut Bench<'_>, _: &str) {}

// ------------------------------------------------------------------------------------------- our layers

const CEILING: u32 = 64;

fn configured() -> Provider {
    let settings = ProviderSettings::new().ceiling(CEILING);
    Fleet::local().configure("bench", settings).expect("valid settings")
}

/// Its tokens are limited, and never run out.
fn counted() -> Provider {
    let settings = ProviderSettings::new().ceiling(CEILING).tokens_per_minute(u32::MAX);
    Fleet::local().configure("counted", settings).expect("valid settings")
}

fn unconfigured() -> Provider {
    Fleet::local().provider("bench")
}

/// A number is a success, whichever it is.
#[derive(Clone, Copy, Debug)]
struct Numbers;

impl Classify<u64> for Numbers {
    #[inline]
    fn classify(&self, outcome: Result<&u64, &(dyn Error + 'static)>) -> Signal {
        Signal::new(if outcome.is_ok() { Kind::Success } else { Kind::Failed })
    }
}

fn number_stack(
    provider: &Provider,
) -> impl Service<u64, Response = u64, Future: Send> + Clone + Send + use<> {
    ServiceBuilder::new()
        .layer(JitteredRetryLayer::new().classify(Numbers))
        .layer(RetryAfterLayer::new(provider).classify(Numbers))
        .layer(FleetLimitLayer::new(provider).until_reply().classify(Numbers))
        .layer(ClassifyLayer::new(provider).classify(Numbers).replies())
        .service(Inner)
}

/// The same with a breaker in its place: outside the pause.
fn broken_stack(
    provider: &Provider,
) -> impl Service<u64, Response = u64, Future: Send> + Clone + Send + use<> {
    ServiceBuilder::new()
        .layer(JitteredRetryLayer::new().classify(Numbers))
        .layer(BreakerLayer::new(provider).classify(Numbers))
        .layer(RetryAfterLayer::new(provider).classify(Numbers))
        .layer(FleetLimitLayer::new(provider).until_reply().classify(Numbers))
        .layer(ClassifyLayer::new(provider).classify(Numbers).replies())
        .service(Inner)
}

/// A breaker alone, and around a sensor.
fn breaker_alone(
    provider: &Provider,
) -> impl Service<u64, Response = u64, Future: Send> + Clone + Send + use<> {
    BreakerLayer::new(provider).classify(Numbers).layer(Inner)
}

fn http_stack(
    provider: &Provider,
) -> impl Service<HttpRequest, Response: Consume, Future: Send> + Clone + Send + use<> {
    ServiceBuilder::new()
        .layer(JitteredRetryLayer::new())
        .layer(RetryAfterLayer::new(provider))
        .layer(FleetLimitLayer::new(provider))
        .layer(ClassifyLayer::new(provider))
        .service(Inner)
}

/// Adaptive throttling over the sensor that counts for it.
fn throttled(provider: &Provider) -> impl Service<u64, Response = u64, Future: Send> + Clone + Send + use<> {
    ServiceBuilder::new()
        .layer(BudgetLayer::new(provider).classify(Numbers))
        .layer(ClassifyLayer::new(provider).classify(Numbers).replies())
        .service(Inner)
}

fn numbers_of_ours(bench: &mut Bench<'_>) {
    let provider = configured();
    let retry = JitteredRetryLayer::new().classify(Numbers).layer(Inner);
    bench.calls::<u64, _>("u64/ours/retry", retry);
    let breaker = BreakerLayer::new(&configured()).classify(Numbers).layer(Inner);
    bench.calls::<u64, _>("u64/ours/breaker", breaker);
    let pause = RetryAfterLayer::new(&provider).classify(Numbers).layer(Inner);
    bench.calls::<u64, _>("u64/ours/pause", pause);
    let limit = FleetLimitLayer::new(&provider).until_reply().classify(Numbers).layer(Inner);
    bench.calls::<u64, _>("u64/ours/limit", limit);
    // A provider of its own: from its first layer on the sensor counts for it.
    let budget = BudgetLayer::new(&configured()).classify(Numbers).layer(Inner);
    bench.calls::<u64, _>("u64/ours/budget", budget);
    bench.calls::<u64, _>("u64/ours/budget over classify", throttled(&configured()));
    let sensor = ClassifyLayer::new(&provider).classify(Numbers).replies().layer(Inner);
    bench.calls::<u64, _>("u64/ours/classify", sensor);
    bench.calls::<u64, _>("u64/ours/ramp", RampedReadmissionLayer::new(&provider).layer(Inner));
    let sensor = ClassifyLayer::new(&provider).classify(Numbers).replies();
    let pause = RetryAfterLayer::new(&provider).classify(Numbers);
    bench.calls::<u64, _>("u64/ours/pause over classify", pause.layer(sensor.layer(Inner)));
    let limit = FleetLimitLayer::new(&provider).until_reply().classify(Numbers);
    bench.calls::<u64, _>("u64/ours/limit over classify", limit.layer(sensor.layer(Inner)));
    let provider = configured();
    let sensor = ClassifyLayer::new(&provider).classify(Numbers).replies();
    let breaker = BreakerLayer::new(&provider).classify(Numbers);
    bench.calls::<u64, _>("u64/ours/breaker over classify", breaker.layer(sensor.layer(Inner)));
    let provider = configured();
    let counted = counted();
    let used = of_reply(|used: &u64| Some(Amount::micros(*used)));
    let spend = SpendLayer::new(&counted, |_: &u64| Amount::micros(9), used).classify(Numbers);
    bench.calls::<u64, _>("u64/ours/spend, nothing to keep", spend.layer(Inner));
    let month = Allowance::new(Amount::MAX);
    bench.calls::<u64, _>("u64/ours/spend", spend.within(&month).layer(Inner));
    let tokens = |provider: &Provider| {
        let used = of_reply(|used: &u64| Some(*used));
        TokenLimitLayer::with(provider, |_: &u64| 9_u64, used).classify(Numbers).layer(Inner)
    };
    bench.calls::<u64, _>("u64/ours/tokens, nothing to keep", tokens(&provider));
    bench.calls::<u64, _>("u64/ours/tokens", tokens(&counted));
    bench.calls::<u64, _>("u64/ours/stack", number_stack(&provider));
    bench.calls::<u64, _>("u64/ours/stack with breaker", broken_stack(&configured()));
    bench.calls::<u64, _>("u64/ours/stack, nothing configured", number_stack(&unconfigured()));
}

fn http_of_ours(bench: &mut Bench<'_>) {
    let provider = configured();
    bench.calls::<HttpRequest, _>("http/ours/retry", JitteredRetryLayer::new().layer(Inner));
    bench.calls::<HttpRequest, _>("http/ours/breaker", BreakerLayer::new(&configured()).layer(Inner));
    bench.calls::<HttpRequest, _>("http/ours/pause", RetryAfterLayer::new(&provider).layer(Inner));
    bench.calls::<HttpRequest, _>("http/ours/limit", FleetLimitLayer::new(&provider).layer(Inner));
    bench.calls::<HttpRequest, _>("http/ours/budget", BudgetLayer::new(&configured()).layer(Inner));
    let own = configured();
    let sensor = ClassifyLayer::new(&own).layer(Inner);
    bench.calls::<HttpRequest, _>("http/ours/budget over classify", BudgetLayer::new(&own).layer(sensor));
    bench.calls::<HttpRequest, _>("http/ours/classify", ClassifyLayer::new(&provider).layer(Inner));
    bench.calls::<HttpRequest, _>("http/ours/ramp", RampedReadmissionLayer::new(&provider).layer(Inner));
    bench.calls::<HttpRequest, _>("http/ours/attempts", AttemptsLayer::new(&provider).layer(Inner));
    let sensor = ClassifyLayer::new(&provider);
    let pause = RetryAfterLayer::new(&provider);
    bench.calls::<HttpRequest, _>("http/ours/pause over classify", pause.layer(sensor.layer(Inner)));
    let limit = FleetLimitLayer::new(&provider);
    bench.calls::<HttpRequest, _>("http/ours/limit over classify", limit.layer(sensor.layer(Inner)));
    let counted = counted();
    let prices = Prices::new(Amount::units(1), Amount::units(1));
    let spend = SpendLayer::new(&counted, |_: &HttpRequest| Amount::micros(9), llm(prices));
    bench.calls::<HttpRequest, _>("http/ours/spend, nothing to keep", spend.layer(Inner));
    let month = Allowance::new(Amount::MAX);
    bench.calls::<HttpRequest, _>("http/ours/spend", spend.clone().within(&month).layer(Inner));
    bench.calls::<HttpRequest, _>(
        "http/ours/tokens, nothing to keep",
        TokenLimitLayer::new(&provider).layer(Inner),
    );
    let tokens = TokenLimitLayer::new(&counted);
    bench.calls::<HttpRequest, _>("http/ours/tokens", tokens.layer(Inner));
    bench.calls::<HttpRequest, _>(
        "http/ours/spend over tokens",
        spend.within(&month).layer(tokens.layer(Inner)),
    );
    bench.calls::<HttpRequest, _>("http/ours/stack", http_stack(&provider));
    bench.calls::<HttpRequest, _>("http/ours/herd", Herd::new(&configured()).layer(Inner));
    bench.calls::<HttpRequest, _>("http/ours/stack, nothing configured", http_stack(&unconfigured()));
}

// ------------------------------------------------------------------------------------------ contention

const THREADS: u32 = 2;

/// One provider, called by this many tasks on two threads at once.
fn contended<Req, S>(bench: &mut Bench<'_>, name: &str, tasks: u64, service: &S)
where
    Req: Sample + 'static,
    S: Service<Req, Response: Consume> + Clone + Send + 'static,
{
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS as usize)
        .enable_time()
        .build()
        .expect("a runtime");
    bench.run(name, |calls| {
        let each = calls.div_ceil(tasks);
        let took = timed(|| {
            runtime.block_on(async {
                let tasks: Vec<_> = (0..tasks)
                    .map(|_| {
                        let mut service = service.clone();
                        tokio::spawn(async move {
                            for turn in 1..=each {
                                one_call(&mut service, &mut Context::from_waker(Waker::noop()));
                                if turn % 64 == 0 {
                                    tokio::task::yield_now().await;
                                }
                            }
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await.expect("no call panics");
                }
            });
        });
        took.mul_div(calls, each * tasks)
    });
}

trait MulDiv {
    fn mul_div(self, by: u64, of: u64) -> Self;
}
impl MulDiv for Duration {
    fn mul_div(self, by: u64, of: u64) -> Self {
        Duration::from_nanos((self.as_nanos() * u128::from(by) / u128::from(of.max(1))) as u64)
    }
}

// ----------------------------------------------------------------------------------------------- table

struct Table<'a>(&'a Samples);

impl Table<'_> {
    fn over(&self, kind: &str, of: &str) -> Option<f64> {
        let inner = self.0.nanos(&format!("{kind}/inner"))?;
        Some(self.0.nanos(&format!("{kind}/{of}"))? - inner)
    }

    fn print(&self) {
        println!(
            "\nNanoseconds that a call takes more than with the bare inner service (fast tenth of the samples):\n"
        );
        println!(
            "| scenario | tower | tower-resilience 0.13.0 | tower-herd | of tower | of the peer | bar |"
        );
        println!("|---|--:|--:|--:|--:|--:|---|");
        let row = |kind: &str, name: &str, tower: &str, peer: &str, ours: &str, bar: &str| {
            let Some(ours) = self.over(kind, &format!("ours/{ours}")) else { return };
            // Less than half a nanosecond cannot be told from nothing.
            let tower = self.over(kind, &format!("tower/{tower}")).filter(|nanos| *nanos > 0.5);
            let peer = self.over(kind, &format!("peer/{peer}"));
            let show = |n: Option<f64>| n.map_or("-".into(), |n| format!("{n:.1}"));
            let ratio = |n: Option<f64>| n.map_or("-".into(), |n| format!("{:.2}", ours / n));
            let (a, b) = (ratio(tower), ratio(peer));
            println!("| {name} | {} | {} | {ours:.1} | {a} | {b} | {bar} |", show(tower), show(peer));
        };
        for (kind, layer, stack, share) in [("u64", 25, 150, "1/5"), ("http", 50, 250, "1/3")] {
            let each = format!("<= {layer}");
            row(kind, &format!("{kind}: retry (peer: with budget)"), "retry", "retry", "retry", &each);
            row(kind, &format!("{kind}: pause (peer: rate limiter)"), "-", "pause", "pause", &each);
            row(kind, &format!("{kind}: limit (peer: bulkhead)"), "limit", "limit", "limit", &each);
            row(
                kind,
                &format!("{kind}: budget (throttling, with its own sensor)"),
                "-",
                "-",
                "budget",
                &each,
            );
            row(kind, &format!("{kind}: classify"), "-", "-", "classify", &each);
            row(kind, &format!("{kind}: ramp"), "-", "-", "ramp", &each);
            row(kind, &format!("{kind}: attempts"), "-", "-", "attempts", &each);
            let all = format!("<= {stack}, <= {share} of the peer");
            row(kind, &format!("{kind}: stack"), "stack", "stack", "stack", &all);
            row(kind, &format!("{kind}: breaker"), "-", "-", "breaker", &each);
            let with = "stack with breaker";
            row(kind, &format!("{kind}: {with}"), "-", with, with, &all);
            row(kind, "http: `Herd`, all layers in one", "stack", "stack with breaker", "herd", "<= 150");
            let unknown = "stack, nothing configured";
            row(kind, &format!("{kind}: {unknown}"), "stack", "stack", unknown, &all);
        }
        println!("\nWhat a gate adds where a sensor below it watches the call, as in a stack:\n");
        println!("| scenario | tower-herd | bar |");
        println!("|---|--:|---|");
        for (kind, bar) in [("u64", 25), ("http", 50)] {
            for layer in ["breaker", "budget", "pause", "limit"] {
                let both = self.over(kind, &format!("ours/{layer} over classify"));
                if let (Some(both), Some(sensor)) = (both, self.over(kind, "ours/classify")) {
                    println!("| {kind}: {layer} over classify | {:.1} | <= {bar} |", both - sensor);
                }
            }
        }
        println!("\nWhat counts money and tokens (the body of 512 bytes is read for what it tells):\n");
        println!("| scenario | tower-herd |");
        println!("|---|--:|");
        for kind in ["u64", "http"] {
            for layer in
                ["spend, nothing to keep", "spend", "tokens, nothing to keep", "tokens", "spend over tokens"]
            {
                if let Some(nanos) = self.over(kind, &format!("ours/{layer}")) {
                    println!("| {kind}: {layer} | {nanos:.1} |");
                }
            }
        }
        if let Some(nanos) = self.0.nanos("http/clone") {
            println!("\nTo clone and drop that request alone: {nanos:.1} ns.");
        }
        println!("\nMillions of calls a second through one provider, {THREADS} threads:\n");
        println!("| stack | 1 task | 16 tasks | ratio |");
        println!("|---|--:|--:|--:|");
        for kind in ["u64", "http", "breaker", "budget over classify"] {
            let rate = |tasks: u32| self.0.nanos(&format!("{kind}/contended/{tasks}")).map(|n| 1e3 / n);
            if let (Some(one), Some(many)) = (rate(1), rate(16)) {
                println!("| {kind} | {one:.2} | {many:.2} | {:.2} |", many / one);
            }
        }
    }
}

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let _context = runtime.enter();
    let samples = Samples::default();
    let mut criterion = Criterion::default()
        .without_plots()
        .sample_size(50)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(1200))
        .configure_from_args();
    let mut bench = Bench { criterion: &mut criterion, samples: &samples };
    towers::<u64>(&mut bench, "u64");
    peers::<u64>(&mut bench, "u64");
    numbers_of_ours(&mut bench);
    towers::<HttpRequest>(&mut bench, "http");
    let request = HttpRequest::make();
    bench.run("http/clone", |calls| timed(|| (0..calls).for_each(|_| drop(black_box(request.clone())))));
    peers::<HttpRequest>(&mut bench, "http");
    http_of_ours(&mut bench);
    let (number, http) = (configured(), configured());
    let (breaker, watched) = (configured(), configured());
    for tasks in [1, 16] {
        contended::<u64, _>(
            &mut bench,
            &format!("breaker/contended/{tasks}"),
            tasks,
            &breaker_alone(&breaker),
        );
        contended::<u64, _>(&mut bench, &format!("u64/contended/{tasks}"), tasks, &number_stack(&number));
        contended::<HttpRequest, _>(
            &mut bench,
            &format!("http/contended/{tasks}"),
            tasks,
            &http_stack(&http),
        );
        let name = format!("budget over classify/contended/{tasks}");
        contended::<u64, _>(&mut bench, &name, tasks, &throttled(&watched));
    }
    criterion.final_summary();
    Table(&samples).print();
}
