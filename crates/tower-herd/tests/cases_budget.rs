//! The retry budget and adaptive throttling, as callers see them; and the field's cases about them.

mod common;
#[path = "retry_support/mod.rs"]
mod support;

use common::{Answer, Script, answer, ms, request, secs};
use std::{
    error::Error,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use support::{MS, Status, Step, Understand, get, of, provider, retry, send};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceBuilder, ServiceExt};
use tower_herd::{
    Budget, BudgetLayer, ClassifyLayer, Fleet, HashedFailover, JitteredRetryLayer, Kind, Mode, Provider,
    ProviderSettings, RatioBudget, Refusal, RefusalKind, Signal, Switch, Task, TokenBucketBudget,
    budget::BudgetSettings,
    classify_fn,
    failover::Rung,
    observe::{Event, Observe},
};

type Throttled = common::Boxed;

/// The throttle over the sensor, around it.
fn throttled(layer: &BudgetLayer, provider: &Provider, inner: Script) -> Throttled {
    let sensor = ClassifyLayer::new(provider).replies();
    Throttled::new(ServiceBuilder::new().layer(layer.clone()).layer(sensor).service(inner))
}

async fn ask(service: &Throttled, request: common::Request) -> Result<u16, Refusal> {
    let reply = service.clone().oneshot(request).await;
    reply.map(|reply| reply.status().as_u16()).map_err(|error| Refusal::find(&*error).expect("ours").clone())
}

/// Fails this many calls, whatever is refused meanwhile.
async fn fail(service: &Throttled, script: &Script, calls: usize) {
    let before = script.calls();
    for n in 0.. {
        if script.calls() - before >= calls {
            return;
        }
        ask(service, request(1_000_000 + n)).await.ok();
    }
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Observe for Log {
    fn observe(&self, event: &Event<'_>) {
        let line = match event {
            Event::Refused { provider, scope, kind, .. } => format!("refused {provider} {scope:?} {kind:?}"),
            Event::WouldRefuse { provider, scope, kind, .. } => {
                format!("would {provider} {scope:?} {kind:?}")
            }
            _ => return,
        };
        self.0.lock().unwrap().push(line);
    }
}

// --------------------------------------------------------------------------------- adaptive throttling

#[tokio::test(start_paused = true)]
async fn from_half_failures_on_a_share_is_refused_and_told_when() {
    let log = Log::default();
    let search = Fleet::local().seed(1).observer(log.clone()).provider("search").scope("web");
    let layer = BudgetLayer::new(&search);
    let script = Script::new(|n, _| answer(if n % 2 == 0 { 200 } else { 500 }));
    let service = throttled(&layer, &search, script.clone());
    for n in 0..100 {
        assert!(ask(&service, request(n)).await.is_ok(), "half of them are accepted");
    }
    let dead = throttled(&layer, &search, Script::always(answer(503)));
    let mut refused = 0;
    for n in 0..1000 {
        let Err(refusal) = ask(&dead, request(n)).await else { continue };
        refused += 1;
        assert_eq!((refusal.kind, &*refusal.provider), (RefusalKind::Shed, "search"));
        assert_eq!(refusal.scope.as_deref(), Some("web"));
        let wait = refusal.retry_at.unwrap() - Instant::now();
        assert!((1000..=2000).contains(&wait.as_millis()), "{wait:?}");
    }
    assert!((700..900).contains(&refused), "{refused}");
    assert_eq!(log.0.lock().unwrap().len(), refused);
    assert_eq!(log.0.lock().unwrap()[0], r#"refused search Some("web") Shed"#);
    assert!(layer.share() > 0.85);
    tokio::time::advance(secs(31)).await;
    assert_eq!(layer.share(), 0.0, "the window has passed");
    assert!(ask(&dead, request(1)).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_switch_observes_and_stands_aside() {
    let log = Log::default();
    let search = Fleet::local().seed(1).observer(log.clone()).provider("search");
    let switch = Switch::new(Mode::Observe);
    let layer = BudgetLayer::new(&search).switch(&switch);
    assert_eq!(layer.handle().mode(), Mode::Observe);
    let script = Script::always(answer(500));
    let service = throttled(&layer, &search, script.clone());
    for n in 0..100 {
        assert!(ask(&service, request(n)).await.is_ok());
    }
    let would = switch.would_refuse() as usize;
    assert!((75..95).contains(&would), "{would}");
    assert_eq!(log.0.lock().unwrap().len(), would);
    assert_eq!(log.0.lock().unwrap()[0], "would search None Shed");
    assert_eq!(layer.share(), 0.9, "a hundred calls, none of them counted twice");

    switch.set(Mode::Off);
    for n in 0..100 {
        assert!(ask(&service, request(n)).await.is_ok());
    }
    assert_eq!((switch.would_refuse() as usize, log.0.lock().unwrap().len()), (would, would));

    // Turned on, it goes by what is.
    switch.set(Mode::Enforce);
    let mut refused = 0;
    for n in 0..100 {
        refused += usize::from(ask(&service, request(n)).await.is_err());
    }
    assert!((75..=97).contains(&refused), "{refused}");
    assert_eq!(script.calls(), 300 - refused);
}

#[tokio::test(start_paused = true)]
async fn settings_belong_to_the_provider_and_each_scope_has_its_own() {
    let search = Fleet::local().seed(1).provider("search");
    let web = search.scope("web");
    let strict = BudgetSettings::new().k(1.1).cap(0.5).window(secs(60));
    let layer = BudgetLayer::configured(&web, strict).unwrap();
    assert!(BudgetLayer::configured(&search.scope("web"), strict).is_ok(), "the same again");
    let error = BudgetLayer::configured(&web, BudgetSettings::new()).unwrap_err();
    assert!(error.to_string().contains("search") && error.field == "budget", "{error}");
    let error = BudgetLayer::configured(&web, strict.k(0.5)).unwrap_err();
    assert_eq!(error.field, "k");
    assert_eq!((BudgetLayer::new(&web).in_force(), layer.in_force()), (strict, strict));
    assert_eq!(BudgetLayer::new(&search).in_force(), BudgetSettings::default());
    // What fails in one scope says nothing about the other, and counts for the provider.
    let whole = BudgetLayer::new(&search);
    let other = BudgetLayer::new(&search.scope("news"));
    let script = Script::always(answer(500));
    fail(&throttled(&layer, &web, script.clone()), &script, 50).await;
    assert_eq!(layer.share(), 0.5, "the cap");
    assert_eq!((other.share(), whole.share()), (0.0, 0.9));
}

#[tokio::test(start_paused = true)]
async fn each_setting_of_the_throttle_changes_what_is_refused() {
    // Refused of a thousand at 30 % failures, the share then, and that six seconds later.
    let outcome = async |settings: BudgetSettings| {
        let search = Fleet::local().seed(1).provider("search");
        let layer = BudgetLayer::configured(&search, settings).unwrap();
        let script = Script::new(|n, _| answer(if matches!(n % 10, 3 | 6 | 9) { 500 } else { 200 }));
        let service = throttled(&layer, &search, script.clone());
        let mut refused = 0;
        for n in 0..1000 {
            refused += usize::from(ask(&service, request(n)).await.is_err());
        }
        let share = layer.share();
        tokio::time::advance(secs(6)).await;
        (refused, share, layer.share())
    };
    let (refused, share, later) = outcome(BudgetSettings::new()).await;
    assert_eq!((refused, share, later), (0, 0.0, 0.0), "two for one: more than half is accepted");
    let (refused, share, later) = outcome(BudgetSettings::new().k(1.1)).await;
    assert!(refused > 500 && share > 0.5, "less than ten in eleven is: {refused} {share}");
    assert_eq!(share, later, "within the window");
    let (fewer, capped, _) = outcome(BudgetSettings::new().k(1.1).cap(0.1)).await;
    assert!((50..150).contains(&fewer) && capped == 0.1, "{fewer} {capped}");
    let (_, share, later) = outcome(BudgetSettings::new().k(1.1).window(secs(5))).await;
    assert!(share > 0.5 && later == 0.0, "the window has passed: {later}");
}

#[tokio::test(start_paused = true)]
async fn without_a_sensor_it_senses_its_own_calls() {
    let search = Fleet::local().seed(1).provider("search");
    let plain = |outcome: Result<&u64, &(dyn Error + 'static)>| match outcome {
        Ok(_) => Signal::new(Kind::Success),
        Err(_) => Signal::new(Kind::Failed),
    };
    let layer = BudgetLayer::new(&search).classify(classify_fn(plain));
    let mut service = layer.layer(tower::service_fn(|_: u64| async { Err::<u64, _>("down") }));
    let mut sent = 0;
    for n in 0..1000 {
        let error = service.ready().await.unwrap().call(n).await.unwrap_err();
        sent += u64::from(Refusal::find(&*error).is_none());
    }
    assert!((80..250).contains(&sent), "{sent}");
}

// Both count outcomes once, where a layer between them hides the sensor from the gate.
#[tokio::test(start_paused = true)]
async fn a_call_is_counted_once_though_two_watch_it() {
    let search = Fleet::local().seed(1).provider("search");
    let layer = BudgetLayer::new(&search);
    let script = Script::new(|n, _| answer(if n % 2 == 0 { 200 } else { 500 }));
    let sensor = ClassifyLayer::new(&search).replies().layer(script);
    // Defers the inner call.
    let deferred = tower::service_fn(move |request: common::Request| {
        let sensor = sensor.clone();
        async move { sensor.oneshot(request).await }
    });
    let service = Throttled::new(tower::util::BoxCloneService::new(layer.layer(deferred)));
    for n in 0..200 {
        assert!(ask(&service, request(n)).await.is_ok());
        assert_eq!(layer.share(), 0.0, "after {n}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_call_is_neutral_and_one_that_outlived_its_task_is_not() {
    let search = Fleet::local().seed(1).provider("search");
    let layer = BudgetLayer::configured(&search, BudgetSettings::new().least(0)).unwrap();
    let service = throttled(&layer, &search, Script::always(answer(200).after(secs(20))));
    for n in 0..50 {
        tokio::time::timeout(secs(1), ask(&service, request(n))).await.unwrap_err();
    }
    assert_eq!(layer.share(), 0.0);
    for n in 0..5 {
        let late = common::until(n, ms(500));
        tokio::time::timeout(secs(1), ask(&service, late)).await.ok();
    }
    assert!(layer.share() > 0.5, "{}", layer.share());
}

#[tokio::test(start_paused = true)]
async fn who_comes_back_after_a_refusal_is_not_a_new_request() {
    let search = Fleet::local().seed(1).provider("search");
    // Without a cap the share tells how many requests were counted; and the window outlasts the test.
    let settings = BudgetSettings::new().window(secs(3600)).cap(1.0);
    let layer = BudgetLayer::configured(&search, settings).unwrap();
    let script = Script::always(answer(500));
    let aside = throttled(&layer.clone().switch(&Switch::new(Mode::Off)), &search, script.clone());
    for n in 0..200 {
        ask(&aside, request(n)).await.ok();
    }
    let service = throttled(&layer, &search, script.clone());
    let counted = |requests: f64| (layer.share() - requests / (requests + 1.0)).abs() < 1e-9;
    assert!(counted(200.0), "{}", layer.share());
    // Two tasks ask again and again: each counts as one that was refused.
    for (id, requests) in [(1000, 201.0), (1001, 202.0)] {
        let task = Task::new(id).deadline_in(secs(600));
        for _ in 0..15 {
            assert!(ask(&service, of(&task, get())).await.is_err());
            assert!(counted(requests), "{}", layer.share());
        }
    }
    // Who has no task cannot be told from anybody else.
    ask(&service, get()).await.unwrap_err();
    assert!(counted(203.0) && script.calls() == 200);
}

#[tokio::test(start_paused = true)]
async fn a_probe_is_never_thrown_away() {
    let fleet = Fleet::local().seed(1);
    let search = fleet.configure("search", ProviderSettings::new().ceiling(4)).unwrap();
    let settings = BudgetSettings::new().window(secs(3600)).cap(1.0);
    let layer = BudgetLayer::configured(&search, settings).unwrap();
    let script = Script::new(|n, _| answer(if n < 999 { 500 } else { 200 }));
    let aside = throttled(&layer.clone().switch(&Switch::new(Mode::Off)), &search, script.clone());
    for n in 0..999 {
        ask(&aside, request(n)).await.ok();
    }
    assert!(layer.share() > 0.99);
    let rung = throttled(&layer, &search, script.clone());
    search.pause_for(secs(3600));
    tokio::time::advance(secs(301)).await;
    let ladder = HashedFailover::new([Rung::new(&search, rung)]).unwrap();
    let reply = ladder.oneshot(request(1)).await.unwrap();
    assert_eq!((reply.status(), script.calls()), (http::StatusCode::OK, 1000));
}

#[tokio::test(start_paused = true)]
async fn in_a_ladder_who_is_refused_goes_to_the_next_rung() {
    let fleet = Fleet::local().seed(1);
    let (a, b) = (fleet.provider("a"), fleet.provider("b"));
    let layer = BudgetLayer::new(&a);
    let (dead, well) = (Script::always(answer(500)), Script::always(answer(200)));
    let rung = throttled(&layer, &a, dead.clone());
    fail(&rung, &dead, 50).await;
    let sent = dead.calls();
    let ladder =
        HashedFailover::new([Rung::new(&a, rung), Rung::new(&b, common::rung(&b, well.clone())).tier(1)])
            .unwrap();
    for n in 0..100 {
        assert_eq!(ladder.clone().oneshot(request(n)).await.unwrap().status(), 200);
    }
    assert_eq!(well.calls(), 100);
    assert!(dead.calls() - sent <= 25, "{}", dead.calls() - sent);
    assert_eq!((a.in_flight(), b.in_flight()), (0, 0));
}

/// 100 calls a second for a while: how many of the calls of each second were answered with a 200.
async fn traffic(service: &Throttled, seconds: u64) -> Vec<usize> {
    static IDS: AtomicU64 = AtomicU64::new(0);
    let mut served = Vec::new();
    for _ in 0..seconds {
        let mut ok = 0;
        for _ in 0..100 {
            tokio::time::advance(ms(10)).await;
            let id = IDS.fetch_add(1, Ordering::Relaxed);
            ok += usize::from(ask(service, request(id)).await == Ok(200));
        }
        served.push(ok);
    }
    served
}

// PEERS: after a healthy hour of 100,000 calls a peer sends 100,100 of 100,000 into a total outage.
#[tokio::test(start_paused = true)]
async fn a_total_outage_gets_one_call_in_ten_and_is_over_within_75_s() {
    let search = Fleet::local().seed(1).provider("search");
    let layer = BudgetLayer::new(&search);
    let end = Arc::new(Mutex::new((Instant::now(), Instant::now())));
    let outage = end.clone();
    let script = Script::new(move |_, _| {
        let (from, to) = *outage.lock().unwrap();
        answer(if (from..to).contains(&Instant::now()) { 503 } else { 200 })
    });
    let service = throttled(&layer, &search, script.clone());
    assert!(traffic(&service, 120).await.iter().all(|served| *served == 100));
    *end.lock().unwrap() = (Instant::now(), Instant::now() + secs(300));
    let before = script.calls();
    assert_eq!(traffic(&service, 300).await.iter().sum::<usize>(), 0);
    let sent = script.calls() - before;
    // The first 30 s are the window turning over: about a half of them is sent.
    assert!((2700..=5500).contains(&sent), "{sent} of 30000");
    let back = traffic(&service, 100).await;
    let last = back.iter().rposition(|served| *served < 95).unwrap() + 1;
    assert!((20..=75).contains(&last), "{last} s: {back:?}");
}

// ------------------------------------------------------------------------------- the load on a provider

/// Wire calls, tasks that made one, and tasks that succeeded, of `tasks` calls 10 ms apart.
async fn load(
    stack: common::Boxed,
    tasks: u64,
    calls: impl Fn() -> Vec<Option<Task>>,
) -> (usize, usize, usize) {
    let all = (0..tasks).map(|n| {
        let stack = stack.clone();
        async move {
            tokio::time::sleep(MS(n * 10)).await;
            let mut request = request(n);
            request.extensions_mut().insert(Task::new(n).allowance(5).deadline_in(secs(60)));
            stack.oneshot(request).await.is_ok_and(|reply| reply.status() == 200)
        }
    });
    let done = futures_util::future::join_all(all).await.into_iter().filter(|ok| *ok).count();
    let calls = calls();
    let mut ids: Vec<_> = calls.iter().flatten().map(Task::id).collect();
    let wire = ids.len();
    ids.sort();
    ids.dedup();
    (wire, ids.len(), done)
}

fn tasks_of(script: &Script) -> Vec<Option<Task>> {
    script.seen.lock().unwrap().iter().map(|(_, task, _)| task.clone()).collect()
}

fn coin(n: usize) -> Answer {
    answer(if (n as u64 ^ 0x5555).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 == 0 { 200 } else { 500 })
}

// PEERS: at 50 percent failures and 5 attempts allowed, peers send 1.95 calls a request.
#[tokio::test(start_paused = true)]
async fn at_half_failures_the_load_is_that_of_the_budget_and_more_than_half_succeed() {
    for throttle in [false, true] {
        for seed in 0..2 {
            let search = Fleet::local().seed(seed).provider("search");
            let script = Script::new(|n, _| coin(n));
            let layer = JitteredRetryLayer::new().attempts(5).seed(seed);
            let inner = if throttle {
                throttled(&BudgetLayer::new(&search), &search, script.clone())
            } else {
                common::Boxed::new(ClassifyLayer::new(&search).replies().layer(script.clone()))
            };
            let stack = common::Boxed::new(layer.layer(inner));
            let (wire, tasks, done) = load(stack, 10_000, || tasks_of(&script)).await;
            // Within 100 s the reserve of 3 refills 10 times.
            assert!(wire * 10 <= tasks * 11 + 130, "{wire} calls of {tasks} tasks");
            assert!(done * 100 >= tasks * 52, "{done} of {tasks}");
            assert!(tasks * 100 >= 99 * 10_000, "all get their turn: {tasks}");
        }
    }
}

/// Three whole stacks in each other, four attempts each, and a budget of its own for each.
fn three_stacks(search: &Provider, script: Script, budget: impl Fn() -> RatioBudget) -> common::Boxed {
    let sensor = ClassifyLayer::new(search).replies();
    let mut stack = common::Boxed::new(sensor.layer(script));
    for seed in 0..3 {
        let layer = JitteredRetryLayer::new().attempts(4).budget(budget()).seed(seed);
        stack = common::Boxed::new(layer.layer(stack));
    }
    stack
}

#[tokio::test(start_paused = true)]
async fn three_stacks_of_four_attempts_do_not_multiply_before_a_dead_provider() {
    const N: u64 = 3000;
    let shared = RatioBudget::default();
    for own in [true, false] {
        let search = Fleet::local().seed(1).provider("search");
        let script = Script::always(answer(500));
        let budget = || if own { RatioBudget::default() } else { shared.clone() };
        let stack = three_stacks(&search, script.clone(), budget);
        let (wire, tasks, _) = load(stack, N, || tasks_of(&script)).await;
        assert_eq!(tasks, N as usize);
        // 30 s: the reserve refills three times.
        assert!(wire as f64 <= 1.1 * N as f64 + 3.0 + 3.0, "{wire} for {N}, a budget each: {own}");
    }
}

// The same where the provider does not answer at all: an error bears no mark.
#[tokio::test(start_paused = true)]
async fn three_stacks_do_not_multiply_before_a_provider_that_cannot_be_reached() {
    const N: u64 = 3000;
    let (service, seen) = provider([Step::Error("refused", Duration::ZERO)]);
    let mut stack = tower::util::BoxCloneService::new(service);
    for seed in 0..3 {
        let layer = JitteredRetryLayer::new().attempts(4).seed(seed).classify(Understand);
        stack = tower::util::BoxCloneService::new(layer.layer(stack));
    }
    let tasks = || seen.calls.lock().unwrap().iter().map(|(_, task, _)| task.clone()).collect();
    let (wire, ..) = load(stack, N, tasks).await;
    assert!(wire as f64 <= 1.1 * N as f64 + 3.0 + 3.0, "{wire} for {N}");
}

// ------------------------------------------------------------------------------------- the token bucket

#[tokio::test(start_paused = true)]
async fn the_token_bucket_hears_what_could_be_sent_again_and_nothing_else() {
    let after = async |script: Vec<Step>| {
        let budget = TokenBucketBudget::new(10, 0.5);
        (0..4).for_each(|_| budget.failed());
        let (service, _) = provider(script);
        send(&retry().budget(budget.clone()), &service, of(&Task::new(1).allowance(9), get())).await.ok();
        budget.tokens()
    };
    assert_eq!(after(vec![Status(200)]).await, 6.5);
    assert_eq!(after(vec![Status(204)]).await, 6.5, "found nothing, and is well");
    assert_eq!(after(vec![Status(429), Status(429), Status(200)]).await, 6.5, "flow control");
    assert_eq!(after(vec![Status(404)]).await, 6.0, "the request is at fault");
    assert_eq!(after(vec![Status(401)]).await, 6.0);
    assert_eq!(after(vec![Status(501)]).await, 6.0, "never sent again, by its nature");
    // 6 - 1 = 5, which is half of 10: the first failure takes a token, and is not repeated.
    assert_eq!(after(vec![Status(500), Status(200)]).await, 5.0);
    assert_eq!(after(vec![Step::Refuse(RefusalKind::Open, None)]).await, 6.0, "nothing was sent");
}

#[tokio::test(start_paused = true)]
async fn a_pushback_of_never_takes_a_token() {
    let budget = TokenBucketBudget::new(10, 0.1);
    let reply = answer(200).header("content-type", "application/grpc");
    let script = Script::always(reply.header("grpc-status", 8).header("grpc-retry-pushback-ms", -1));
    let http2 = script.clone().map_response(|mut reply| {
        *reply.version_mut() = http::Version::HTTP_2;
        reply
    });
    let retry = || JitteredRetryLayer::new().budget(budget.clone());
    retry().layer(http2.clone()).oneshot(request(1)).await.unwrap();
    assert_eq!((script.calls(), budget.tokens()), (1, 9.0));
    // One reply is one token, however many layers see it.
    retry().layer(retry().layer(http2)).oneshot(request(2)).await.unwrap();
    assert_eq!((script.calls(), budget.tokens()), (2, 8.0));
}

#[tokio::test(start_paused = true)]
async fn stacked_layers_tell_a_shared_bucket_once() {
    let budget = TokenBucketBudget::new(10, 0.5);
    (0..4).for_each(|_| budget.failed());
    let stack = |script: Vec<Step>| {
        let (service, _) = provider(script);
        retry().budget(budget.clone()).layer(retry().budget(budget.clone()).layer(service))
    };
    let task = |n| of(&Task::new(n).allowance(9), get());
    stack(vec![Status(200)]).oneshot(task(1)).await.unwrap();
    assert_eq!(budget.tokens(), 6.5, "one success");
    stack(vec![Status(500), Status(500)]).oneshot(task(2)).await.unwrap();
    assert_eq!(budget.tokens(), 4.5, "two failures, and the outer layer repeats none");
}

#[tokio::test(start_paused = true)]
async fn in_a_ladder_each_rung_has_its_own_bucket() {
    let fleet = Fleet::local().seed(1);
    let providers = ["a", "b"].map(|name| fleet.provider(name));
    let scripts = [500, 200].map(|status| Script::always(answer(status)));
    let rungs = (0..2)
        .map(|i| Rung::new(&providers[i], common::rung(&providers[i], scripts[i].clone())).tier(i as u32));
    let budget = TokenBucketBudget::new(10, 0.5);
    let ladder = HashedFailover::new(rungs).unwrap().budget(&budget);
    let tokens = |name: &str| {
        let part = budget.of(name).unwrap();
        (0..)
            .take_while(|_| {
                part.try_withdraw() && {
                    part.failed();
                    true
                }
            })
            .count()
    };
    let service = JitteredRetryLayer::new().budget(budget.clone()).seed(1).layer(ladder);
    for n in 0..4 {
        assert_eq!(service.clone().oneshot(request(n)).await.unwrap().status(), 200);
    }
    assert_eq!(scripts.each_ref().map(Script::calls), [4, 4]);
    assert_eq!((tokens("a"), tokens("b")), (1, 5), "four failures there, none here");
}

// ---------------------------------------------------------------------------------- cases from the field

// tower-rs/tower#857: a ratio of 0.6 granted as much as 1.0. Here over time, by provider, and with a ceiling.
#[tokio::test(start_paused = true)]
async fn tower_857_a_share_is_exact_over_hours_and_for_each_provider() {
    for (ratio, share) in [(0.3, 3), (0.4, 4), (0.6, 6), (0.7, 7)] {
        let budget = RatioBudget::new(ratio).reserve(0, secs(10));
        let part = budget.open("search").unwrap();
        let mut granted = [0; 2];
        for n in 0..36_000u32 {
            budget.deposit();
            part.deposit();
            granted[0] += u32::from(budget.try_withdraw());
            granted[1] += u32::from(part.try_withdraw());
            if n % 10 == 9 {
                tokio::time::advance(secs(1)).await;
            }
        }
        assert_eq!(granted, [3600 * share; 2], "{ratio}");
    }
}

// twitter/finagle#956: stacked filters pay in twice. Through a ladder of two rungs, two retry layers above it,
// and a throttle that refuses on the way.
#[tokio::test(start_paused = true)]
async fn finagle_956_one_deposit_however_many_layers_share_the_budget() {
    let fleet = Fleet::local().seed(1);
    let providers = ["a", "b"].map(|name| fleet.provider(name));
    let scripts = [500, 200].map(|status| Script::always(answer(status)));
    let rungs = (0..2)
        .map(|i| Rung::new(&providers[i], common::rung(&providers[i], scripts[i].clone())).tier(i as u32));
    let budget = RatioBudget::new(0.1).reserve(0, secs(10));
    let ladder = HashedFailover::new(rungs).unwrap().budget(&budget);
    let layer = JitteredRetryLayer::new().budget(budget.clone()).seed(1);
    let service = layer.layer(layer.layer(ladder));
    for n in 0..10 {
        service.clone().oneshot(request(n)).await.unwrap();
    }
    assert_eq!(budget.balance(), 1.0, "ten originals, one repetition earned");
    for name in ["a", "b"] {
        let part = budget.of(name).unwrap();
        assert_eq!((0..9).filter(|_| part.try_withdraw()).count(), 1, "{name}");
    }
}

// NousResearch/hermes-agent#91713: an agent repeated a tool call that could not work for five hours. Each tool
// is a scope with a throttle of its own; what the loop sends there is a small part of what it wants to, and
// the other tools do not notice.
#[tokio::test(start_paused = true)]
async fn hermes_agent_91713_a_futile_loop_reaches_the_tool_seldom_and_the_other_tools_not_at_all() {
    let tools = Fleet::local().seed(1).provider("tools");
    let (broken, well) = (tools.scope("browser"), tools.scope("calculator"));
    let futile = Script::always(answer(500).after(ms(500)));
    let useful = Script::always(answer(200));
    // A tool that fails its first call need not be tried a few times more.
    let layers =
        [&broken, &well].map(|tool| BudgetLayer::configured(tool, BudgetSettings::new().least(0)).unwrap());
    let budget = RatioBudget::default().per_minute(5);
    let retry = JitteredRetryLayer::new().budget(budget.clone()).seed(1);
    let browser = common::Boxed::new(retry.layer(throttled(&layers[0], &broken, futile.clone())));
    let calculator = throttled(&layers[1], &well, useful.clone());
    let (start, mut wanted) = (Instant::now(), 0);
    while start.elapsed() < secs(5 * 3600) {
        let mut call = request(wanted);
        call.extensions_mut().insert(Task::new(wanted).deadline_in(secs(10)));
        browser.clone().oneshot(call).await.ok();
        assert_eq!(ask(&calculator, request(wanted)).await, Ok(200));
        wanted += 1;
    }
    // Alone it would be one every half second, and three attempts each.
    let sent = futile.calls();
    assert!((500..36_000 / 15).contains(&sent), "{sent} calls in five hours");
    // After the first minute, in which it has to find out.
    let times: Vec<_> = futile.times(start).into_iter().filter(|at| *at >= 60_000).collect();
    let most = times.iter().map(|at| times.iter().filter(|t| (*at..at + 60_000).contains(t)).count()).max();
    assert!(most <= Some(25), "{most:?} in one minute");
    assert_eq!((useful.calls() as u64, layers[1].share()), (wanted, 0.0));
}

// A client that calls seldom is not sent away by chance: of one call that failed the formula would refuse a half.
#[tokio::test(start_paused = true)]
async fn with_few_requests_nothing_is_refused() {
    for least in [0, 5, 40] {
        let search = Fleet::local().seed(1).provider("search");
        let layer = BudgetLayer::configured(&search, BudgetSettings::new().least(least)).unwrap();
        let service = throttled(&layer, &search, Script::always(answer(500)));
        for sent in 0..u64::from(least) {
            assert_eq!(layer.share(), 0.0, "after {sent} of {least}");
            ask(&service, request(sent)).await.unwrap();
        }
        ask(&service, request(1000)).await.ok();
        assert!(layer.share() > 0.4, "{least}: {}", layer.share());
    }
}
