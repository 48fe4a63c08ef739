//! Several processes under one ceiling: each a fleet of its own, all on one store, under a paused clock.

use http_body_util::BodyExt as _;
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tower_herd::{
    Alert, BreakerLayer, BreakerSettings, ClassifyLayer, Fleet, FleetLimitLayer, PauseReason, Provider,
    ProviderSettings, RatioBudget, Refusal, RefusalKind, RetryAfterLayer, TaskLayer, TokenLimitLayer,
    store::{
        Chunk, Exchange, FleetSettings, FleetStore, Grant, LeaseState, Leave, Listen, MemoryStore, Opened,
        Outage, Quantity, Report, ScopeGrant, SharedPause, StoreError, StoreErrorKind, Wake,
    },
};

type Request = http::Request<String>;
type Response = http::Response<String>;

const MS: fn(u64) -> Duration = Duration::from_millis;

/// A provider that counts what is in flight.
#[derive(Clone, Default)]
struct Counter(Arc<Counts>);

#[derive(Default)]
struct Counts {
    now: AtomicU32,
    most: AtomicU32,
    calls: AtomicU32,
}

struct Flight(Counter);

/// A store that can be lost.
#[derive(Clone)]
struct Line {
    store: MemoryStore,
    down: Arc<AtomicBool>,
    deaf: bool,
}

impl Line {
    fn new(store: &MemoryStore) -> Self {
        Line { store: store.clone(), down: Arc::default(), deaf: false }
    }
    fn cut(&self, down: bool) {
        self.down.store(down, SeqCst);
    }
}

impl FleetStore for Line {
    fn exchange<'a>(&'a self, provider: &'a str, report: &'a Report) -> Exchange<'a> {
        Box::pin(async move {
            sleep(MS(1)).await;
            if self.down.load(SeqCst) {
                return Err(StoreError::from(StoreErrorKind::Unreachable));
            }
            self.store.exchange(provider, report).await
        })
    }
    fn listen<'a>(&'a self, wakes: &'a (dyn Fn(Wake<'_>) + Send + Sync)) -> Listen<'a> {
        if self.deaf { Box::pin(std::future::pending()) } else { self.store.listen(wakes) }
    }
}

impl Counter {
    fn begin(&self) -> Flight {
        let now = self.0.now.fetch_add(1, SeqCst) + 1;
        self.0.most.fetch_max(now, SeqCst);
        self.0.calls.fetch_add(1, SeqCst);
        Flight(self.clone())
    }
    fn most(&self) -> u32 {
        self.0.most.load(SeqCst)
    }
    fn calls(&self) -> u32 {
        self.0.calls.load(SeqCst)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.0.0.now.fetch_sub(1, SeqCst);
    }
}

fn process(store: &(impl FleetStore + Clone), seed: u64, settings: FleetSettings) -> Fleet {
    Fleet::shared(store.clone(), settings.on_this_runtime()).expect("valid settings").seed(seed)
}

fn stack(
    provider: &Provider,
    counter: &Counter,
    latency: Duration,
) -> impl Service<Request, Response: Send, Error = tower_herd::BoxError, Future: Send> + Clone + Send + use<>
{
    let counter = counter.clone();
    ServiceBuilder::new()
        .layer(TaskLayer::new().deadline(Duration::from_secs(600)))
        .layer(RetryAfterLayer::new(provider))
        .layer(FleetLimitLayer::new(provider))
        .layer(ClassifyLayer::new(provider))
        .service(service_fn(move |_: Request| {
            let flight = counter.begin();
            async move {
                sleep(latency).await;
                drop(flight);
                Ok::<_, std::io::Error>(Response::new(String::new()))
            }
        }))
}

async fn calls(provider: Provider, counter: Counter, latency: Duration, many: usize) -> u32 {
    let service = stack(&provider, &counter, latency);
    let mut done = 0;
    for _ in 0..many {
        done += u32::from(service.clone().oneshot(Request::default()).await.is_ok());
    }
    done
}

#[tokio::test(start_paused = true)]
async fn processes_share_one_ceiling() {
    let store = MemoryStore::new();
    let counter = Counter::default();
    let begin = Instant::now();
    let mut tasks = Vec::new();
    let mut providers = Vec::new();
    for seed in 0..4 {
        let fleet = process(&store, seed, FleetSettings::new());
        let provider = fleet.configure("search", ProviderSettings::new().ceiling(6)).expect("valid");
        for _ in 0..5 {
            tasks.push(tokio::spawn(calls(provider.clone(), counter.clone(), MS(1000), 15)));
        }
        providers.push(provider);
    }
    let mut done = 0;
    for task in tasks {
        done += task.await.expect("no panic");
    }
    let took = begin.elapsed();
    assert_eq!(done, 300);
    assert!(counter.most() <= 6, "{} in flight", counter.most());
    // 300 calls of a second on 6 slots: 50 s.
    let lease = providers[0].lease().expect("in a fleet");
    assert!(took < Duration::from_secs(56), "{took:?}, {lease:?}");
    assert_eq!((lease.state, lease.members, lease.ceiling), (LeaseState::Held, 4, 6));
    let exchanges: u64 =
        providers.iter().map(|provider| provider.lease().expect("in a fleet").exchanges).sum();
    let rate = exchanges as f64 / 4.0 / took.as_secs_f64();
    eprintln!("{took:?}, {rate:.2} exchanges a second and process");
    assert!(rate <= 2.0, "{rate}");
}

// With times of a lease that are shorter than the defaults, everything is: nobody is taken for silent who reports as
// often as it is to.
#[tokio::test(start_paused = true)]
async fn processes_with_short_leases_share_one_ceiling() {
    let store = MemoryStore::new();
    let settings = FleetSettings::new().ttl(MS(2500)).renew(MS(200)).gap(MS(600)).answer_within(MS(200));
    let mut counters = Vec::new();
    for seed in 0..4 {
        let provider = configured(&process(&store, seed, settings.clone()), 10);
        let counter = Counter::default();
        for _ in 0..10 {
            tokio::spawn(calls(provider.clone(), counter.clone(), MS(40), 100_000));
        }
        counters.push(counter);
        sleep(MS(1000)).await;
    }
    let before: Vec<u32> = counters.iter().map(Counter::calls).collect();
    sleep(MS(10_000)).await;
    // 250 calls a second: a quarter of them each, if it came out even.
    for (counter, before) in counters.iter().zip(before) {
        let calls = counter.calls() - before;
        assert!((300..=900).contains(&calls), "{calls}");
    }
}

fn configured(fleet: &Fleet, ceiling: u32) -> Provider {
    fleet.configure("search", ProviderSettings::new().ceiling(ceiling)).expect("valid")
}

/// A stack whose provider answers what `answer` says, after 10 ms.
fn answering<F: Fn() -> Response + Clone + Send + 'static>(
    provider: &Provider,
    answer: F,
) -> impl Service<Request, Response: Send, Error = tower_herd::BoxError, Future: Send> + Clone + Send + use<F>
{
    ServiceBuilder::new()
        .layer(TaskLayer::new().deadline(Duration::from_secs(600)))
        .layer(RetryAfterLayer::new(provider))
        .layer(FleetLimitLayer::new(provider))
        .layer(ClassifyLayer::new(provider))
        .service(service_fn(move |_: Request| {
            let answer = answer();
            async move {
                sleep(MS(10)).await;
                Ok::<_, std::io::Error>(answer)
            }
        }))
}

fn status(code: u16) -> Response {
    http::Response::builder().status(code).body(String::new()).expect("valid")
}

fn throttled(seconds: u64) -> Response {
    let builder = http::Response::builder().status(429).header("retry-after", seconds.to_string());
    builder.body(String::new()).expect("valid")
}

// One process's wait is everybody's: at once where wake-ups come through, within a renewal where they do not.
#[tokio::test(start_paused = true)]
async fn a_retry_after_holds_every_process() {
    for deaf in [false, true] {
        let store = MemoryStore::new();
        let line = Line { deaf, ..Line::new(&store) };
        let providers: Vec<_> =
            (0..3).map(|seed| configured(&process(&line, seed, FleetSettings::new()), 30)).collect();
        sleep(MS(3000)).await;
        answering(&providers[0], || throttled(20)).oneshot(Request::default()).await.expect("a reply");
        let told = Instant::now();
        sleep(MS(if deaf { 1200 } else { 50 })).await;
        for provider in &providers {
            let (until, _) = provider.paused_until().expect("paused");
            let left = until - told;
            assert!(left >= MS(20_000) && left <= MS(21_300), "{left:?}");
        }
        let waited = Instant::now();
        answering(&providers[2], || status(200)).oneshot(Request::default()).await.expect("a reply");
        assert!(waited.elapsed() >= MS(20_000 - 1200));
        // An operator ends it for all.
        providers[1].pause_for(MS(60_000));
        sleep(MS(1200)).await;
        assert!(providers.iter().all(|provider| provider.paused_until().is_some()));
        providers[2].clear_pause();
        sleep(MS(1200)).await;
        assert!(providers.iter().all(|provider| provider.paused_until().is_none()), "{deaf}");
    }
}

// A success of a call sent after the pause ends it for all.
#[tokio::test(start_paused = true)]
async fn a_scope_that_is_paused_is_paused_everywhere() {
    let store = MemoryStore::new();
    let providers: Vec<_> =
        (0..3).map(|seed| configured(&process(&store, seed, FleetSettings::new()), 30)).collect();
    sleep(MS(3000)).await;
    let large = providers[0].scope("large");
    answering(&large, || throttled(30)).oneshot(Request::default()).await.expect("a reply");
    sleep(MS(50)).await;
    assert!(providers[1].scope("large").paused_until().is_some());
    assert!(providers[1].paused_until().is_none() && providers[1].scope("small").paused_until().is_none());
}

// PrefectHQ/prefect#20251, inngest/inngest#3733: a lease that has run out is worth nothing, and is no error of the
// provider either.
#[tokio::test(start_paused = true)]
async fn the_outage_policy_holds_when_the_store_is_lost() {
    let cases = [
        (Outage::Stop, 0, 0, 0),
        // 10 slots, 2 processes: half of an equal share of 5.
        (Outage::Keep(0.5), 2, 2, 0),
        (Outage::Keep(0.0), 0, 0, 0),
        (Outage::Local(3), 3, 3, 3),
    ];
    for (outage, at_first, after, overshoot) in cases {
        let store = MemoryStore::new();
        let line = Line::new(&store);
        let settings = FleetSettings::new().outage(outage).grace(MS(30_000));
        let providers: Vec<_> =
            (0..2).map(|seed| configured(&process(&line, seed, settings.clone()), 10)).collect();
        let counter = Counter::default();
        let mut tasks = Vec::new();
        for provider in &providers {
            for _ in 0..8 {
                tasks.push(tokio::spawn(calls(provider.clone(), counter.clone(), MS(500), 1000)));
            }
        }
        sleep(MS(5000)).await;
        assert_eq!(counter.0.now.load(SeqCst), 10);
        line.cut(true);
        sleep(MS(6000)).await;
        assert_eq!(counter.0.now.load(SeqCst), 10, "{outage:?}: six renewals may fail");
        sleep(MS(3000)).await;
        let lease = providers[0].lease().expect("in a fleet");
        assert_eq!((lease.state, lease.slots), (LeaseState::Lost, at_first), "{outage:?}");
        assert!(counter.0.now.load(SeqCst) <= 2 * after, "{outage:?}");
        sleep(MS(5000)).await;
        let lease = providers[0].lease().expect("in a fleet");
        assert_eq!((lease.slots, lease.overshoot_possible), (after, overshoot), "{outage:?}");
        // The grace is over.
        sleep(MS(25_000)).await;
        let lease = providers[0].lease().expect("in a fleet");
        assert_eq!(lease.slots, if outage == Outage::Local(3) { 3 } else { 0 }, "{outage:?}");
        let calls = counter.calls();
        line.cut(false);
        sleep(MS(14_000)).await;
        assert_eq!(counter.0.now.load(SeqCst), 10, "{outage:?}: back to full use");
        assert!(counter.calls() > calls && counter.most() <= 10, "{outage:?} {}", counter.most());
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

// Those who wait are told when it ends, and what for: never that the provider failed.
#[tokio::test(start_paused = true)]
async fn until_the_store_has_answered_nobody_is_admitted() {
    let line = Line::new(&MemoryStore::new());
    line.cut(true);
    let provider = configured(&process(&line, 1, FleetSettings::new()), 10);
    let service = ServiceBuilder::new()
        .layer(FleetLimitLayer::new(&provider).patience(MS(300)))
        .layer(ClassifyLayer::new(&provider))
        .service(service_fn(|_: Request| async { Ok::<_, std::io::Error>(status(200)) }));
    let Err(error) = service.clone().oneshot(Request::default()).await else {
        panic!("admitted without a lease")
    };
    assert_eq!(Refusal::find(&*error).map(|refusal| refusal.kind), Some(RefusalKind::NoSlot));
    assert_eq!(provider.lease().expect("in a fleet").state, LeaseState::Joining);
    line.cut(false);
    sleep(MS(2000)).await;
    assert!(service.oneshot(Request::default()).await.is_ok());
}

// rust-lang/rust#87906, #79462: the machine slept, and others have its slots by now.
#[tokio::test(start_paused = true)]
async fn a_machine_that_slept_has_no_lease() {
    let store = MemoryStore::new();
    let line = Line::new(&store);
    let (slept, clock) = (Arc::new(AtomicU64::new(0)), Instant::now());
    let behind = slept.clone();
    let settings = FleetSettings::new()
        .outage(Outage::Stop)
        .on_this_runtime()
        .lease_clock(move || clock.elapsed() + Duration::from_secs(behind.load(SeqCst)));
    let fleet = Fleet::shared(line.clone(), settings).expect("valid");
    let provider = configured(&fleet, 10);
    sleep(MS(2000)).await;
    let counter = Counter::default();
    assert_eq!(calls(provider.clone(), counter.clone(), MS(10), 5).await, 5);
    // The first call after it meets the old lease before anybody has renewed it.
    line.cut(true);
    slept.store(60, SeqCst);
    let call = tokio::spawn(calls(provider.clone(), counter.clone(), MS(10), 1));
    sleep(MS(400)).await;
    assert_eq!((counter.calls(), provider.in_flight()), (5, 0));
    line.cut(false);
    assert_eq!(call.await.expect("no panic"), 1);
}

#[tokio::test(start_paused = true)]
async fn who_leaves_gives_its_slots_back_at_once() {
    let store = MemoryStore::new();
    let fleets: Vec<_> = (0..2).map(|seed| process(&store, seed, FleetSettings::new())).collect();
    let providers: Vec<_> = fleets.iter().map(|fleet| configured(fleet, 4)).collect();
    let counter = Counter::default();
    let first = tokio::spawn(calls(providers[0].clone(), counter.clone(), MS(200), 20));
    let rest: Vec<_> =
        (0..3).map(|_| tokio::spawn(calls(providers[0].clone(), counter.clone(), MS(200), 20))).collect();
    sleep(MS(2000)).await;
    assert_eq!(providers[0].lease().expect("in a fleet").slots, 4);
    first.await.expect("no panic");
    for task in rest {
        task.await.expect("no panic");
    }
    fleets[0].leave().await;
    assert_eq!(providers[0].lease().expect("in a fleet").slots, 0);
    let begin = Instant::now();
    let tasks: Vec<_> =
        (0..4).map(|_| tokio::spawn(calls(providers[1].clone(), counter.clone(), MS(200), 1))).collect();
    for task in tasks {
        assert_eq!(task.await.expect("no panic"), 1);
    }
    assert!(begin.elapsed() < MS(600), "{:?}", begin.elapsed());
    // Dropped, it does the same by itself.
    drop((providers, fleets));
    sleep(MS(100)).await;
    let last = configured(&process(&store, 9, FleetSettings::new()), 4);
    sleep(MS(1500)).await;
    assert_eq!(last.lease().expect("in a fleet").members, 1);
}

/// Law 6: one prober and one alert over the fleet; it opens and closes for all.
#[tokio::test(start_paused = true)]
async fn one_breaker_for_all() {
    let store = MemoryStore::new();
    let alerts = Arc::new(Mutex::new(Vec::<Alert>::new()));
    let healthy = Arc::new(AtomicBool::new(false));
    let (calls, flying, most) =
        (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let mut tasks = Vec::new();
    let mut providers = Vec::new();
    for seed in 0..10 {
        let fleet = process(&store, seed, FleetSettings::new());
        let provider = configured(&fleet, 50);
        let told = alerts.clone();
        let settings = BreakerSettings::strict();
        let layer = BreakerLayer::new(&provider).settings(settings).expect("valid").on_alert(move |alert| {
            told.lock().expect("no panic").push(alert.clone());
        });
        let (healthy, calls, flying, most) = (healthy.clone(), calls.clone(), flying.clone(), most.clone());
        let service = ServiceBuilder::new()
            .layer(layer)
            .layer(FleetLimitLayer::new(&provider))
            .layer(ClassifyLayer::new(&provider))
            .service(service_fn(move |_: Request| {
                let ok = healthy.load(SeqCst);
                calls.fetch_add(1, SeqCst);
                most.fetch_max(flying.fetch_add(1, SeqCst) + 1, SeqCst);
                let flying = flying.clone();
                async move {
                    sleep(MS(100)).await;
                    flying.fetch_sub(1, SeqCst);
                    Ok::<_, std::io::Error>(status(if ok { 200 } else { 500 }))
                }
            }));
        providers.push(provider);
        tasks.push(tokio::spawn(async move {
            sleep(MS(3000 + 7 * seed)).await;
            loop {
                drop(service.clone().oneshot(Request::default()).await);
                sleep(MS(100)).await;
            }
        }));
    }
    sleep(MS(6000)).await;
    let open = calls.load(SeqCst);
    assert!(open <= 10 * 8, "{open} calls until it was open for all");
    assert_eq!(alerts.lock().expect("no panic").len(), 1, "one alert");
    most.store(0, SeqCst);
    sleep(MS(120_000)).await;
    let probes = calls.load(SeqCst) - open;
    assert!((3..=24).contains(&probes), "{probes} probes in two minutes, of ten processes");
    assert_eq!(most.load(SeqCst), 1, "one at a time");
    healthy.store(true, SeqCst);
    sleep(MS(35_000)).await;
    for provider in &providers {
        assert!(provider.paused_until().is_none(), "closed for all: {provider:?}");
    }
    assert_eq!(alerts.lock().expect("no panic").len(), 1);
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
}

// bucket4j/bucket4j#501, envoyproxy/envoy#36478: what all processes together send in any time is the rate, and the
// burst, and not that times the processes.
#[tokio::test(start_paused = true)]
async fn requests_a_minute_are_those_of_the_fleet() {
    let store = MemoryStore::new();
    let sent = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for seed in 0..5 {
        let fleet = process(&store, seed, FleetSettings::new());
        let settings = ProviderSettings::new().ceiling(100).requests_per_minute(600);
        let provider = fleet.configure("search", settings).expect("valid");
        for _ in 0..10 {
            let (provider, sent) = (provider.clone(), sent.clone());
            tasks.push(tokio::spawn(async move {
                let service = answering(&provider, move || {
                    sent.lock().expect("no panic").push(Instant::now());
                    status(200)
                });
                loop {
                    drop(service.clone().oneshot(Request::default()).await);
                }
            }));
        }
    }
    sleep(MS(60_000)).await;
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    let sent = sent.lock().expect("no panic").clone();
    // 10 a second, at most 20 at once, and chunks are good for 2 s.
    for (i, first) in sent.iter().enumerate() {
        for window in [1, 5, 30] {
            let many =
                sent[i..].iter().take_while(|at| **at - *first < Duration::from_secs(window)).count() as u64;
            assert!(many <= 10 * (window + 2) + 20, "{many} in {window} s");
        }
    }
    assert!(sent.len() >= 540, "{} of 600", sent.len());
}

/// A store in whose place an empty one may come.
#[derive(Clone)]
struct Forgetful(Arc<Mutex<MemoryStore>>);

impl Forgetful {
    fn new() -> Self {
        Forgetful(Arc::new(Mutex::new(MemoryStore::new())))
    }
    fn forget(&self) {
        *self.0.lock().expect("no panic") = MemoryStore::may_have_lost();
    }
}

impl FleetStore for Forgetful {
    fn exchange<'a>(&'a self, provider: &'a str, report: &'a Report) -> Exchange<'a> {
        Box::pin(async move {
            sleep(MS(1)).await;
            let store = self.0.lock().expect("no panic").clone();
            store.exchange(provider, report).await
        })
    }
    fn listen<'a>(&'a self, _: &'a (dyn Fn(Wake<'_>) + Send + Sync)) -> Listen<'a> {
        Box::pin(std::future::pending())
    }
}

// Law 1: what a store forgot is no reason not to hear of a new pause: the generations of an empty one begin anew.
#[tokio::test(start_paused = true)]
async fn a_store_that_lost_its_data_tells_of_pauses_again() {
    let store = Forgetful::new();
    let providers: Vec<_> =
        (0..3).map(|seed| configured(&process(&store, seed, FleetSettings::new()), 30)).collect();
    sleep(MS(3000)).await;
    for _ in 0..5 {
        providers[0].pause_for(MS(60_000));
        sleep(MS(1500)).await;
        providers[0].clear_pause();
        sleep(MS(1500)).await;
    }
    assert!(providers.iter().all(|provider| provider.paused_until().is_none()));
    store.forget();
    sleep(MS(15_000)).await;
    providers[0].pause_for(MS(60_000));
    sleep(MS(1500)).await;
    assert!(providers.iter().all(|provider| provider.paused_until().is_some()), "{providers:?}");
    providers[1].clear_pause();
    sleep(MS(1500)).await;
    assert!(providers.iter().all(|provider| provider.paused_until().is_none()), "{providers:?}");
}

// A breaker that the store knows nothing of (it lost its data, or has no room for so many scopes) is probed by the
// schedule of each process, or it would never close.
#[tokio::test(start_paused = true)]
async fn a_breaker_that_the_store_does_not_know_closes_again() {
    let store = Forgetful::new();
    let healthy = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    let mut providers = Vec::new();
    for seed in 0..3 {
        let provider = configured(&process(&store, seed, FleetSettings::new()), 50);
        let layer = BreakerLayer::new(&provider).settings(BreakerSettings::strict()).expect("valid");
        let healthy = healthy.clone();
        let service = ServiceBuilder::new()
            .layer(layer)
            .layer(FleetLimitLayer::new(&provider))
            .layer(ClassifyLayer::new(&provider))
            .service(service_fn(move |_: Request| {
                let ok = healthy.load(SeqCst);
                async move { Ok::<_, std::io::Error>(status(if ok { 200 } else { 500 })) }
            }));
        providers.push(provider);
        tasks.push(tokio::spawn(async move {
            sleep(MS(3000)).await;
            loop {
                drop(service.clone().oneshot(Request::default()).await);
                sleep(MS(100)).await;
            }
        }));
    }
    sleep(MS(10_000)).await;
    assert!(providers.iter().all(|provider| provider.paused_until().is_some()), "open for all");
    store.forget();
    sleep(MS(15_000)).await;
    healthy.store(true, SeqCst);
    sleep(MS(700_000)).await;
    for provider in &providers {
        assert!(provider.paused_until().is_none(), "{provider:?}");
    }
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
}

// Law 6: more scopes than the book has room for. Those that are left out have their own alert, and their own probes.
#[tokio::test(start_paused = true)]
async fn breakers_beyond_the_room_of_the_book_alert_and_close_by_themselves() {
    const SCOPES: usize = 70;
    let provider = configured(&process(&MemoryStore::new(), 1, FleetSettings::new()), 200);
    let healthy = Arc::new(AtomicBool::new(false));
    let alerts = Arc::new(Mutex::new(Vec::<Alert>::new()));
    let mut tasks = Vec::new();
    let scopes: Vec<_> = (0..SCOPES).map(|n| provider.scope(&format!("model-{n}"))).collect();
    for scope in &scopes {
        let (told, healthy) = (alerts.clone(), healthy.clone());
        let layer = BreakerLayer::new(scope).settings(BreakerSettings::strict()).expect("valid").on_alert(
            move |alert| {
                told.lock().expect("no panic").push(alert.clone());
            },
        );
        let service = ServiceBuilder::new()
            .layer(layer)
            .layer(FleetLimitLayer::new(scope))
            .layer(ClassifyLayer::new(scope));
        let service = service.service(service_fn(move |_: Request| {
            let ok = healthy.load(SeqCst);
            async move { Ok::<_, std::io::Error>(status(if ok { 200 } else { 500 })) }
        }));
        tasks.push(tokio::spawn(async move {
            sleep(MS(2000)).await;
            loop {
                drop(service.clone().oneshot(Request::default()).await);
                sleep(MS(100)).await;
            }
        }));
    }
    sleep(MS(30_000)).await;
    assert_eq!(alerts.lock().expect("no panic").len(), SCOPES);
    healthy.store(true, SeqCst);
    sleep(MS(100_000)).await;
    let open = scopes.iter().filter(|scope| scope.paused_until().is_some()).count();
    assert_eq!(open, 0);
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
}

// "From here on this process admits nothing": whatever the policy leaves a process that has lost its store, and
// whichever provider it asks for later.
#[tokio::test(start_paused = true)]
async fn who_has_left_stays_away() {
    let store = MemoryStore::new();
    let fleet = process(&store, 1, FleetSettings::new().outage(Outage::Local(3)));
    let provider = configured(&fleet, 4);
    sleep(MS(2000)).await;
    let counter = Counter::default();
    assert_eq!(calls(provider.clone(), counter.clone(), MS(10), 2).await, 2);
    tokio::join!(fleet.leave(), fleet.leave());
    fleet.leave().await;
    let later = fleet.configure("later", ProviderSettings::new().ceiling(4)).expect("valid");
    fleet.leave().await;
    // Its last lease is over.
    sleep(MS(10_000)).await;
    for provider in [&provider, &later] {
        tokio::spawn(calls(provider.clone(), counter.clone(), MS(10), 1));
    }
    sleep(MS(60_000)).await;
    assert_eq!((counter.calls(), provider.in_flight(), later.in_flight()), (2, 0, 0));
    // Nor does anybody wait for a goodbye that cannot be said.
    let gone = Line::new(&store);
    let fleet = process(&gone, 2, FleetSettings::new());
    let provider = configured(&fleet, 4);
    gone.cut(true);
    sleep(MS(2000)).await;
    let begin = Instant::now();
    fleet.leave().await;
    assert!(begin.elapsed() <= MS(1100));
    drop(provider);
}

/// A store that panics.
#[derive(Clone)]
struct Broken;

impl FleetStore for Broken {
    fn exchange<'a>(&'a self, _: &'a str, _: &'a Report) -> Exchange<'a> {
        Box::pin(async { panic!("as the test wants it") })
    }
    fn listen<'a>(&'a self, _: &'a (dyn Fn(Wake<'_>) + Send + Sync)) -> Listen<'a> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_panics_takes_nobody_with_it() {
    let fleet = process(&Broken, 1, FleetSettings::new());
    let provider = configured(&fleet, 4);
    sleep(MS(2000)).await;
    let counter = Counter::default();
    let call = tokio::spawn(calls(provider, counter.clone(), MS(10), 1));
    sleep(MS(2000)).await;
    assert_eq!(counter.calls(), 0, "nothing was given");
    fleet.leave().await;
    call.abort();
}

#[test]
fn a_fleet_on_this_runtime_needs_one() {
    let settings = FleetSettings::new().on_this_runtime();
    let error = Fleet::shared(Broken, settings).expect_err("there is none");
    assert_eq!(error.field, "on_this_runtime");
}

/// A store whose answers are anything.
#[derive(Clone)]
struct Nonsense(Arc<AtomicU64>);

impl Nonsense {
    fn any(&self) -> u64 {
        let bits = self.0.fetch_add(0x9e37_79b9_7f4a_7c15, SeqCst);
        let bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let bits = bits ^ bits >> 27;
        match bits % 5 {
            0 => u64::MAX,
            1 => u32::MAX.into(),
            2 => 0,
            3 => bits % 8,
            _ => bits >> (bits % 60),
        }
    }
    fn few(&self) -> u32 {
        u32::try_from(self.any()).unwrap_or(u32::MAX)
    }
    fn is(&self) -> bool {
        self.any().is_multiple_of(2)
    }
    fn scope(&self) -> ScopeGrant {
        let name = ["", "large", "none of ours"][self.any() as usize % 3];
        ScopeGrant {
            scope: self.is().then(|| if self.few() == 7 { "x".repeat(1 << 20) } else { name.to_owned() }),
            generation: self.any(),
            pause: self.is().then(|| SharedPause { wait: self.any(), reason: PauseReason::Hint }),
            open: self.is().then(|| Opened {
                wait: self.any(),
                since: self.any(),
                first: self.any(),
                last: self.any(),
                yours: self.is(),
            }),
            leave: self.is().then(|| Leave { within: self.any() }),
            calls: self.any(),
            throttled: self.any(),
        }
    }
    fn chunk(&self, of: Quantity) -> Chunk {
        Chunk {
            of,
            chunk: self.any(),
            amount: self.any(),
            valid: self.any(),
            per_minute: self.any(),
            burst: self.any(),
        }
    }
}

impl FleetStore for Nonsense {
    fn exchange<'a>(&'a self, _: &'a str, report: &'a Report) -> Exchange<'a> {
        let grant = Grant {
            epoch: if self.is() { report.offer } else { report.epoch.unwrap_or(report.offer) },
            version: self.any(),
            slots: self.few(),
            safe: self.few(),
            target: self.few(),
            contended: self.is(),
            turns: self.is(),
            stale: self.is(),
            before: if self.is() { 0 } else { self.any() },
            learning: self.any(),
            again: self.is().then(|| self.any()),
            members: self.few(),
            weights: self.any(),
            ceiling: self.few(),
            queued: self.few(),
            generation: self.any(),
            disagree: self.is(),
            scopes: (0..self.few() % 4).map(|_| self.scope()).collect(),
            rates: [Quantity::Requests, Quantity::Tokens].map(|of| self.chunk(of)).into(),
        };
        Box::pin(async move {
            sleep(MS(1)).await;
            Ok(grant)
        })
    }
    fn listen<'a>(&'a self, _: &'a (dyn Fn(Wake<'_>) + Send + Sync)) -> Listen<'a> {
        Box::pin(std::future::pending())
    }
}

// Whatever a store answers, nothing panics, and reports go on.
#[tokio::test(start_paused = true)]
async fn a_store_that_answers_nonsense_breaks_nothing() {
    for seed in 0..20 {
        let fleet = process(&Nonsense(Arc::new(AtomicU64::new(seed))), seed, FleetSettings::new());
        let settings = ProviderSettings::new().requests_per_minute(6000).tokens_per_minute(60_000);
        let provider = fleet.configure("search", settings).expect("valid");
        let large = provider.scope("large");
        let tasks: Vec<_> = (0..8)
            .map(|n| {
                let on = if n % 2 == 0 { &provider } else { &large };
                let code = [200, 200, 429, 500][n / 2];
                let layer = BreakerLayer::new(on).settings(BreakerSettings::strict()).expect("valid");
                let stack = ServiceBuilder::new()
                    .layer(TaskLayer::new().deadline(MS(2000)))
                    .layer(layer)
                    .layer(RetryAfterLayer::new(on))
                    .layer(FleetLimitLayer::new(on))
                    .layer(ClassifyLayer::new(on))
                    .service(service_fn(
                        move |_: Request| async move { Ok::<_, std::io::Error>(status(code)) },
                    ));
                tokio::spawn(async move {
                    loop {
                        drop(stack.clone().oneshot(Request::default()).await);
                        sleep(MS(50)).await;
                    }
                })
            })
            .collect();
        let mut before = 0;
        for _ in 0..20 {
            sleep(MS(3000)).await;
            let lease = provider.lease().expect("in a fleet");
            assert!(lease.exchanges > before, "seed {seed}: no reports any more: {lease:?}");
            before = lease.exchanges;
        }
        for task in tasks {
            assert!(!task.is_finished(), "seed {seed}: it panicked");
            task.abort();
        }
    }
}

// The option is nothing if it does not get to the store: what a new book gives out before it knows who else there is.
#[tokio::test(start_paused = true)]
async fn a_trickle_flows_while_a_new_store_learns() {
    for (trickle, slots) in [(0, 0), (2, 2)] {
        let fleet = process(&MemoryStore::may_have_lost(), 1, FleetSettings::new().trickle(trickle));
        let provider = configured(&fleet, 10);
        let counter = Counter::default();
        for _ in 0..5 {
            tokio::spawn(calls(provider.clone(), counter.clone(), MS(1000), 1));
        }
        sleep(MS(4000)).await;
        let lease = provider.lease().expect("in a fleet");
        assert_eq!((lease.state, counter.most()), (LeaseState::Learning, slots), "{trickle}");
        sleep(MS(10_000)).await;
        assert_eq!(counter.calls(), 5, "{trickle}");
    }
}

// A call that used more than there ever is at once: the debt is paid in parts, before anything else, and then calls go
// on. One that can never be paid for is refused at once.
#[tokio::test(start_paused = true)]
async fn a_debt_of_more_than_the_burst_is_paid_off() {
    let store = MemoryStore::new();
    let limits = |burst| ProviderSettings::new().ceiling(100).tokens_per_minute(60_000).token_burst(burst);
    let fleets: Vec<_> = (0..2).map(|seed| process(&store, seed, FleetSettings::new())).collect();
    let provider = fleets[0].configure("search", limits(5000)).expect("valid");
    // The lowest counts for all.
    let _other = fleets[1].configure("search", limits(1000)).expect("valid");
    sleep(MS(4000)).await;
    let call = async |cost: u64| {
        let reply = || {
            let json = r#"{"usage":{"prompt_tokens":6000,"completion_tokens":0}}"#.to_owned();
            http::Response::builder().header("content-type", "application/json").body(json).expect("valid")
        };
        let service = ServiceBuilder::new()
            .layer(TaskLayer::new().deadline(MS(60_000)))
            .layer(TokenLimitLayer::new(&provider).estimate(move |_: &Request| cost))
            .service(service_fn(move |_: Request| async move { Ok::<_, std::io::Error>(reply()) }));
        let reply = service.oneshot(Request::default()).await?;
        Ok::<_, tower_herd::BoxError>(reply.into_body().collect().await.map(drop)?)
    };
    call(100).await.expect("a reply");
    let begin = Instant::now();
    call(100).await.expect("the debt is paid");
    let paid = begin.elapsed();
    assert!((MS(4500)..MS(20_000)).contains(&paid), "{paid:?}");
    let refused = call(1500).await.expect_err("more than the fleet has at once");
    assert_eq!(Refusal::find(&*refused).map(|refusal| refusal.kind), Some(RefusalKind::TooLarge));
}

/// What is kept for the dead adds up to no more than the share: whatever dies without a goodbye, and however often,
/// the rest of the ceiling is there for the living.
#[tokio::test(start_paused = true)]
async fn generations_that_die_without_a_goodbye_leave_the_others_their_part() {
    let store = MemoryStore::new();
    let counter = Counter::default();
    for generation in 0..6 {
        let line = Line::new(&store);
        let providers: Vec<_> = (0..2)
            .map(|n| configured(&process(&line, 100 * generation + n, FleetSettings::new()), 8))
            .collect();
        let tasks: Vec<_> = providers
            .iter()
            .flat_map(|provider| (0..8).map(|_| provider.clone()))
            .map(|provider| tokio::spawn(calls(provider, counter.clone(), MS(500), 1000)))
            .collect();
        // (The store was silent for longer than the gap: it learns for one ttl who is still there.)
        sleep(MS(25_000)).await;
        let slots: u32 = providers.iter().map(|provider| provider.lease().expect("in a fleet").slots).sum();
        assert!(slots >= 4, "generation {generation}: {slots} of 8");
        // Killed: the store hears nothing more of them.
        line.cut(true);
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
        drop(providers);
        sleep(MS(12_000)).await;
    }
    assert!(counter.most() <= 8, "{}", counter.most());
}

// Two that were configured alike say so from the first report on.
#[tokio::test(start_paused = true)]
async fn limits_are_told_from_the_first_report_on() {
    #[derive(Clone, Default)]
    struct Listener(Arc<AtomicU32>);
    impl tower_herd::observe::Observe for Listener {
        fn observe(&self, event: &tower_herd::observe::Event<'_>) {
            if matches!(event, tower_herd::observe::Event::Inconsistent { .. }) {
                self.0.fetch_add(1, SeqCst);
            }
        }
    }
    let store = MemoryStore::new();
    let heard = Listener::default();
    let fleets: Vec<_> =
        (0..20).map(|seed| process(&store, seed, FleetSettings::new()).observer(heard.clone())).collect();
    let providers: Vec<_> = fleets.iter().map(|fleet| configured(fleet, 8)).collect();
    sleep(MS(3000)).await;
    assert_eq!(heard.0.load(SeqCst), 0);
    assert!(providers.iter().all(|provider| provider.lease().is_some_and(|lease| lease.ceiling == 8)));
    // One that is not is told of.
    let other = fleets[0].clone();
    other.provider("search").reconfigure(ProviderSettings::new().ceiling(5)).expect("valid");
    sleep(MS(3000)).await;
    assert!(heard.0.load(SeqCst) > 0);
}

/// Law 3 over a fleet: the reserve for quiet times is one, whoever shares it, and a tenth of the ceiling where that is
/// more.
#[tokio::test(start_paused = true)]
async fn the_reserve_of_retries_is_that_of_the_fleet() {
    for (ceiling, reserve) in [(20, 3), (80, 8)] {
        let store = MemoryStore::new();
        let providers: Vec<_> =
            (0..4).map(|seed| configured(&process(&store, seed, FleetSettings::new()), ceiling)).collect();
        sleep(MS(3000)).await;
        let budgets: Vec<_> =
            providers.iter().map(|provider| RatioBudget::new(0.0).for_fleet([provider])).collect();
        assert!(
            budgets.iter().all(|budget| budget.balance() < 0.1),
            "nobody begins with a reserve of its own"
        );
        // It fills up by one call in 10 s, over all.
        sleep(MS(1_000_000)).await;
        let all: f64 = budgets.iter().map(RatioBudget::balance).sum();
        assert!(all > f64::from(reserve) - 0.1 && all <= f64::from(reserve) + 1e-3, "{all} of {reserve}");
        let own = RatioBudget::new(0.0);
        assert!(own.balance() > 2.9, "one of a single process has its own");
    }
}
