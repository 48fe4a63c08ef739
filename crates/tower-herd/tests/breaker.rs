//! The breaker over time, alone and in stacks, under a paused clock.

mod common;

use common::{Boxed, Request, Response, Script, answer, ms, request, secs, until};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, Service, ServiceBuilder, ServiceExt};
use tower_herd::{
    Alert, BoxError, BreakerLayer, BreakerSettings, ClassifyLayer, Fleet, FleetLimitLayer, HashedFailover,
    Mode, PauseReason, Provider, ProviderSettings, Refusal, RefusalKind, RetryAfterLayer, Switch,
    breaker::{AlertKind, BreakerState},
    failover::Rung,
};

/// A provider that is up or down.
#[derive(Clone)]
struct Plant {
    down: Arc<AtomicBool>,
    took: Arc<AtomicU64>,
    script: Script,
}

fn plant() -> Plant {
    let (down, took) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU64::new(10)));
    let script = Script::new({
        let (down, took) = (down.clone(), took.clone());
        move |_, _| {
            let status = if down.load(Ordering::SeqCst) { 500 } else { 200 };
            answer(status).after(ms(took.load(Ordering::SeqCst)))
        }
    });
    Plant { down, took, script }
}

impl Plant {
    fn down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
    }
    fn calls(&self) -> usize {
        self.script.calls()
    }
}

/// Breaker, pause, limit and sensor, as in a rung.
fn stack(layer: BreakerLayer, provider: &Provider, inner: impl Into<Script>) -> Boxed {
    Boxed::new(
        ServiceBuilder::new()
            .layer(layer)
            .layer(RetryAfterLayer::new(provider))
            .layer(FleetLimitLayer::new(provider).until_reply())
            .layer(ClassifyLayer::new(provider).replies())
            .service(inner.into()),
    )
}

fn strict(provider: &Provider) -> BreakerLayer {
    BreakerLayer::new(provider).strict().unwrap()
}

async fn call(service: &Boxed) -> Result<Response, BoxError> {
    service.clone().oneshot(request(1)).await
}

fn refusal(outcome: Result<Response, BoxError>) -> Refusal {
    Refusal::find(&*outcome.unwrap_err()).expect("a refusal").clone()
}

/// Calls until the provider is called no more; how many it got.
async fn trip(service: &Boxed, plant: &Plant) -> usize {
    let before = plant.calls();
    for _ in 0..100 {
        if call(service).await.is_err() {
            break;
        }
    }
    plant.calls() - before
}

fn provider(seed: u64) -> Provider {
    Fleet::local().seed(seed).provider("p")
}

#[tokio::test(start_paused = true)]
async fn a_dead_provider_is_left_alone_and_callers_are_told_until_when() {
    for (settings, failures) in [(BreakerSettings::new(), 18), (BreakerSettings::strict(), 5)] {
        let (provider, plant) = (provider(1), plant());
        let layer = BreakerLayer::new(&provider).settings(settings).unwrap();
        let handle = layer.handle();
        let service = stack(layer, &provider, plant.script.clone());
        assert_eq!(trip(&service, &plant).await, failures);
        let at = Instant::now();
        let no = refusal(call(&service).await);
        assert_eq!((no.kind, Instant::now()), (RefusalKind::Open, at), "at once");
        let open = no.retry_at.unwrap() - at;
        assert!(open > secs(590) && open < secs(750), "{open:?}");
        assert_eq!((handle.state(), handle.open_until()), (BreakerState::Open, no.retry_at));
        assert_eq!(provider.paused_until(), Some((no.retry_at.unwrap(), PauseReason::Broken)));
        assert_eq!(plant.calls(), failures);
    }
}

/// When the provider is called, in seconds after the trip, by a caller that asks ten times a second.
async fn probes(seed: u64, plant: &Plant, for_: Duration) -> Vec<f64> {
    let provider = provider(seed);
    let service = stack(strict(&provider), &provider, plant.script.clone());
    trip(&service, plant).await;
    let (tripped, before) = (Instant::now(), plant.calls());
    while tripped.elapsed() < for_ {
        sleep(ms(100)).await;
        drop(call(&service).await);
    }
    let seen = plant.script.seen.lock().unwrap();
    seen[before..].iter().map(|(at, ..)| (*at - tripped).as_secs_f64()).collect()
}

#[tokio::test(start_paused = true)]
async fn probes_grow_apart_spread_and_do_not_end_with_the_open_time() {
    let mut firsts = Vec::new();
    for seed in 0..8 {
        let times = probes(seed, &plant(), secs(1500)).await;
        assert!((5.0..10.5).contains(&times[0]), "seed {seed}: {times:?}");
        assert!((10.0..20.5).contains(&(times[1] - times[0])), "seed {seed}: {times:?}");
        for two in times[2..].windows(2) {
            assert!((15.0..30.5).contains(&(two[1] - two[0])), "seed {seed}: {times:?}");
        }
        assert!(times.iter().any(|at| *at > 1400.0), "seed {seed}: half open, it is probed still: {times:?}");
        firsts.push(times[0]);
    }
    firsts.sort_by(f64::total_cmp);
    assert!(firsts[7] - firsts[0] > 2.0, "each process at an instant of its own: {firsts:?}");
}

#[tokio::test(start_paused = true)]
async fn a_good_probe_closes_it_and_what_was_sent_before_counts_no_more() {
    let (provider, plant) = (provider(3), plant());
    let layer = strict(&provider);
    let handle = layer.handle();
    let service = stack(layer, &provider, plant.script.clone());
    // Sent while it was closed, these fail while it is open and after it has closed again.
    plant.took.store(20_000, Ordering::SeqCst);
    let old: Vec<_> = (0..4).map(|_| tokio::spawn(service.clone().oneshot(request(1)))).collect();
    sleep(ms(1)).await;
    plant.took.store(10, Ordering::SeqCst);
    trip(&service, &plant).await;
    plant.down(false);
    let before = plant.calls();
    let mut refused = 0;
    while call(&service).await.is_err() {
        refused += 1;
        sleep(ms(100)).await;
    }
    assert!(refused > 40 && plant.calls() == before + 1, "one probe was enough: {refused}");
    assert_eq!((handle.state(), provider.paused_until()), (BreakerState::Closed, None));
    for old in old {
        assert_eq!(old.await.unwrap().unwrap().status(), 500);
    }
    assert_eq!((handle.state(), handle.failures()), (BreakerState::Closed, 0), "of an earlier epoch");
    // And it starts from nothing: it takes five again.
    plant.down(true);
    assert_eq!(trip(&service, &plant).await, 5);
}

#[tokio::test(start_paused = true)]
async fn when_the_open_time_ends_the_crowd_is_not_let_through() {
    let (provider, plant) = (provider(4), plant());
    let settings = BreakerSettings::strict().open(secs(20)).probes(secs(15), secs(40));
    let layer = BreakerLayer::new(&provider).settings(settings).unwrap();
    let handle = layer.handle();
    let service = stack(layer, &provider, plant.script.clone());
    trip(&service, &plant).await;
    sleep(secs(300)).await;
    assert_eq!(handle.state(), BreakerState::HalfOpen);
    let before = plant.calls();
    let crowd = (0..1000).map(|id| service.clone().oneshot(request(id)));
    let outcomes = futures_util::future::join_all(crowd).await;
    assert_eq!(plant.calls() - before, 1);
    let told: Vec<Option<Instant>> =
        outcomes.into_iter().filter(Result::is_err).map(|outcome| refusal(outcome).retry_at).collect();
    assert_eq!(told.len(), 999);
    let now = Instant::now();
    assert!(told.into_iter().flatten().all(|at| at > now && at < now + secs(41)), "until the next probe");
    assert_eq!(handle.state(), BreakerState::HalfOpen);
}

#[tokio::test(start_paused = true)]
async fn a_probe_goes_not_before_the_end_of_the_servers_own_wait() {
    for hint in [60, 200] {
        let provider = provider(hint);
        // The last failure names a wait.
        let script =
            Script::new(
                move |nth, _| {
                    if nth == 4 { answer(503).header("retry-after", hint) } else { answer(500) }
                },
            );
        let service = stack(strict(&provider), &provider, script.clone());
        let start = Instant::now();
        for _ in 0..4000 {
            drop(service.clone().oneshot(until(1, ms(10))).await);
            sleep(ms(100)).await;
        }
        let times = script.times(start);
        let told = 400 + hint * 1000;
        assert!(times[5] >= told && times[5] < told + 5000, "{hint} s: {times:?}");
        assert!(times.len() > 8, "{times:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_throttled_probe_means_alive() {
    let provider = provider(6);
    let script =
        Script::new(|nth, _| if nth < 5 { answer(500) } else { answer(429).header("retry-after", 7) });
    let layer = strict(&provider);
    let handle = layer.handle();
    let service = stack(layer, &provider, script.clone());
    while handle.state() == BreakerState::Closed {
        drop(call(&service).await);
    }
    while script.calls() == 5 {
        sleep(ms(100)).await;
        drop(service.clone().oneshot(until(1, ms(1))).await);
    }
    assert_eq!(handle.state(), BreakerState::Closed);
    let (end, reason) = provider.paused_until().expect("its hint holds");
    assert_eq!((end - Instant::now(), reason), (secs(7), PauseReason::Hint));
}

#[tokio::test(start_paused = true)]
async fn those_who_queued_before_the_trip_do_not_flood_what_is_dead() {
    let fleet = Fleet::local().seed(7);
    let provider = fleet.configure("p", ProviderSettings::new().ceiling(4)).unwrap();
    let plant = plant();
    plant.took.store(1000, Ordering::SeqCst);
    let service = stack(strict(&provider), &provider, plant.script.clone());
    let start = Instant::now();
    let tasks: Vec<_> = (0..200)
        .map(|id| {
            let call = service.clone().oneshot(until(id, secs(60)));
            tokio::spawn(async move { (call.await, start.elapsed()) })
        })
        .collect();
    let mut refused = Vec::new();
    for task in tasks {
        if let (Err(error), after) = task.await.unwrap() {
            refused.push((Refusal::find(&*error).unwrap().kind, after));
        }
    }
    assert!(plant.calls() <= 5 + 4, "those that trip it, and those in flight then: {}", plant.calls());
    assert!(refused.len() > 185 && refused.iter().all(|(kind, _)| *kind == RefusalKind::Open));
    assert!(refused.iter().all(|(_, after)| *after < secs(3)), "they are told at once: {refused:?}");
    assert_eq!((provider.in_flight(), provider.waiting()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn only_observed_it_counts_whom_it_would_refuse_and_off_it_does_nothing() {
    let (provider, plant) = (provider(8), plant());
    let switch = Switch::new(Mode::Observe);
    let alerts = Arc::new(AtomicU64::new(0));
    let layer = strict(&provider).switch(&switch).on_alert({
        let alerts = alerts.clone();
        move |_| {
            alerts.fetch_add(1, Ordering::SeqCst);
        }
    });
    let handle = layer.handle();
    let service = stack(layer, &provider, plant.script.clone());
    for _ in 0..50 {
        assert_eq!(call(&service).await.unwrap().status(), 500);
    }
    assert_eq!((handle.state(), alerts.load(Ordering::SeqCst)), (BreakerState::Open, 1));
    assert_eq!((plant.calls(), switch.would_refuse(), provider.paused_until()), (50, 45, None));
    // It is well again: the next that would be a probe closes it, and not every success.
    plant.down(false);
    call(&service).await.unwrap();
    assert_eq!(handle.state(), BreakerState::Open);
    sleep(secs(11)).await;
    call(&service).await.unwrap();
    assert_eq!((handle.state(), switch.would_refuse()), (BreakerState::Closed, 46));
    // Off: nothing is counted.
    switch.set(Mode::Off);
    plant.down(true);
    for _ in 0..50 {
        assert!(call(&service).await.is_ok());
    }
    assert_eq!((handle.state(), handle.failures(), switch.would_refuse()), (BreakerState::Closed, 0, 46));
    // Turned on it acts, and turned off again it lets everybody go.
    switch.set(Mode::Enforce);
    assert_eq!(trip(&service, &plant).await, 5);
    assert!(provider.paused_until().is_some());
    switch.set(Mode::Off);
    let (before, start) = (plant.calls(), Instant::now());
    for _ in 0..20 {
        assert!(call(&service).await.is_ok());
    }
    assert_eq!((plant.calls() - before, provider.paused_until()), (20, None));
    assert!(start.elapsed() < secs(3), "{:?}", start.elapsed());
    assert_eq!(handle.switch().would_refuse(), 46);
}

#[tokio::test(start_paused = true)]
async fn one_that_opened_while_observed_is_enforced_when_it_is_switched() {
    let (provider, plant) = (provider(9), plant());
    let switch = Switch::new(Mode::Observe);
    let service = stack(strict(&provider).switch(&switch), &provider, plant.script.clone());
    for _ in 0..20 {
        assert!(call(&service).await.is_ok());
    }
    switch.set(Mode::Enforce);
    assert_eq!(refusal(call(&service).await).kind, RefusalKind::Open);
    assert!(provider.paused_until().is_some());
    assert_eq!(plant.calls(), 20);
}

#[tokio::test(start_paused = true)]
async fn an_operator_opens_closes_and_resets_it() {
    let (provider, plant) = (provider(10), plant());
    plant.down(false);
    let alerts = Arc::new(AtomicU64::new(0));
    let count = alerts.clone();
    let layer = strict(&provider).on_alert(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
    });
    let handle = layer.handle();
    let service = stack(layer, &provider, plant.script.clone());
    handle.force_open();
    for _ in 0..600 {
        let no = refusal(call(&service).await);
        assert_eq!(no.kind, RefusalKind::Open);
        assert!(no.retry_at.unwrap() > Instant::now());
        sleep(ms(100)).await;
    }
    assert_eq!((plant.calls(), handle.state(), handle.open_until()), (0, BreakerState::Forced, None));
    assert_eq!(alerts.load(Ordering::SeqCst), 0, "he knows");
    handle.close();
    assert!(call(&service).await.is_ok() && handle.state() == BreakerState::Closed);
    plant.down(true);
    assert_eq!(trip(&service, &plant).await, 5);
    handle.reset();
    assert_eq!((handle.state(), handle.failures(), handle.incident()), (BreakerState::Closed, 0, None));
    assert_eq!(trip(&service, &plant).await, 5);
    // Whoever ends the pause closes the breaker that it is.
    provider.clear_pause();
    assert_eq!(handle.state(), BreakerState::Closed);
    assert!(call(&service).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_scope_breaks_alone_and_the_provider_with_all_its_scopes() {
    let (whole, plant) = (provider(11), plant());
    let (a, b) = (whole.scope("a"), whole.scope("b"));
    let service_a = stack(strict(&a), &a, plant.script.clone());
    let healthy = Script::always(answer(200));
    let service_b = stack(strict(&b), &b, healthy.clone());
    assert_eq!(trip(&service_a, &plant).await, 5);
    let no = refusal(call(&service_a).await);
    assert_eq!(no.scope.as_deref(), Some("a"));
    assert!(call(&service_b).await.is_ok() && whole.paused_until().is_none());
    // The same calls, counted for all of the provider.
    let provider = provider(12);
    let layer = strict(&provider);
    let handle = layer.handle();
    let plant = self::plant();
    let service = |scope: &str| {
        let scope = provider.scope(scope);
        Boxed::new(layer.layer(stack(BreakerLayer::new(&scope), &scope, plant.script.clone())))
    };
    let (a, b) = (service("a"), service("b"));
    for _ in 0..3 {
        drop((call(&a).await, call(&b).await));
    }
    assert_eq!((plant.calls(), handle.state()), (5, BreakerState::Open));
    assert_eq!(refusal(call(&b).await).scope, None);
}

#[tokio::test(start_paused = true)]
async fn one_alert_an_incident_with_what_it_takes_to_act() {
    let (provider, plant) = (provider(13), plant());
    let alerts: Arc<Mutex<Vec<Alert>>> = Arc::default();
    let heard = alerts.clone();
    let layer = strict(&provider).on_alert(move |alert| heard.lock().unwrap().push(alert.clone()));
    let handle = layer.handle();
    let service = stack(layer, &provider, plant.script.clone());
    let start = Instant::now();
    while start.elapsed() < secs(600) {
        drop(call(&service).await);
        sleep(ms(90)).await;
    }
    let alert = {
        let heard = alerts.lock().unwrap();
        assert_eq!(heard.len(), 1);
        heard[0].clone()
    };
    assert_eq!((alert.kind, &*alert.provider, &alert.scope), (AlertKind::Broken, "p", &None));
    assert_eq!((alert.failures, alert.calls, alert.incident.len()), (5, 5, 16));
    assert_eq!((alert.failing_for, alert.samples.len(), alert.refused), (ms(400), 4, 0));
    assert!(alert.samples.iter().all(|sample| sample.what == "failed"));
    assert_eq!(alert.samples[0].ago, ms(300));
    assert_eq!(alert.last_failure_unix_ms - alert.first_failure_unix_ms, 400);
    assert!((alert.shed_per_second.unwrap() - 10.0).abs() < 1e-9);
    assert!(alert.open_for >= secs(600) && alert.open_for <= secs(750));
    let now = handle.incident().expect("it goes on");
    assert_eq!(now.incident, alert.incident);
    assert!(now.refused > 5000, "{}", now.refused);
    // The next incident is another.
    plant.down(false);
    while call(&service).await.is_err() {
        sleep(ms(100)).await;
    }
    assert_eq!(handle.incident(), None);
    plant.down(true);
    trip(&service, &plant).await;
    let heard = alerts.lock().unwrap();
    assert_eq!(heard.len(), 2);
    assert_ne!(heard[0].incident, heard[1].incident);
}

#[tokio::test(start_paused = true)]
async fn an_empty_account_and_a_wrong_key_have_alerts_of_their_own() {
    for (status, kind) in [(402, AlertKind::Depleted), (401, AlertKind::Misconfigured)] {
        let provider = provider(14);
        let alerts: Arc<Mutex<Vec<Alert>>> = Arc::default();
        let heard = alerts.clone();
        let layer = strict(&provider).on_alert(move |alert| heard.lock().unwrap().push(alert.clone()));
        let handle = layer.handle();
        let service = stack(layer, &provider, Script::always(answer(status).after(ms(10))));
        let calls = (0..10).map(|_| service.clone().oneshot(until(1, secs(1))));
        futures_util::future::join_all(calls).await;
        assert_eq!(handle.state(), BreakerState::Closed, "{status}");
        let heard = alerts.lock().unwrap();
        assert_eq!((heard.len(), heard[0].kind), (1, kind), "once a pause");
        assert_eq!(heard[0].open_for, secs(900));
    }
}

#[tokio::test(start_paused = true)]
async fn two_layers_share_one_breaker_and_its_settings() {
    let provider = provider(15);
    let plant = plant();
    let one = stack(strict(&provider), &provider, plant.script.clone());
    let other = stack(BreakerLayer::new(&provider), &provider, plant.script.clone());
    assert!(BreakerLayer::new(&provider).strict().is_ok(), "the same again");
    let error = BreakerLayer::new(&provider).settings(BreakerSettings::new()).unwrap_err();
    assert!(error.to_string().contains("differ"), "{error}");
    assert!(BreakerLayer::new(&provider.scope("s")).settings(BreakerSettings::new()).is_ok(), "another");
    for _ in 0..3 {
        drop((call(&one).await, call(&other).await));
    }
    assert_eq!(plant.calls(), 5);
    // What counts already keeps its settings, given or not.
    let late = Fleet::local().provider("late");
    let _ = BreakerLayer::new(&late).layer(());
    assert!(BreakerLayer::new(&late).strict().is_err());
}

/// The gates stand behind something that defers the call: the probe is lent, and gets through.
#[tokio::test(start_paused = true)]
async fn a_probe_passes_gates_behind_a_buffer() {
    for ceiling in [1, 10] {
        let fleet = Fleet::local().seed(16);
        let provider = fleet.configure("p", ProviderSettings::new().ceiling(ceiling)).unwrap();
        let plant = plant();
        let inner = ServiceBuilder::new()
            .layer(RetryAfterLayer::new(&provider))
            .layer(FleetLimitLayer::new(&provider).until_reply())
            .layer(ClassifyLayer::new(&provider).replies())
            .service(plant.script.clone());
        let deferred = tower::service_fn(move |request: Request| {
            let inner = inner.clone();
            async move {
                tokio::task::yield_now().await;
                inner.oneshot(request).await
            }
        });
        let service = Boxed::new(strict(&provider).layer(deferred));
        assert_eq!(trip(&service, &plant).await, 5);
        plant.down(false);
        let start = Instant::now();
        while call(&service).await.is_err() {
            sleep(ms(100)).await;
        }
        assert!(start.elapsed() < secs(11), "{:?}", start.elapsed());
        assert_eq!(plant.calls(), 6);
    }
}

/// Without a sensor and without gates the breaker watches for itself.
#[tokio::test(start_paused = true)]
async fn alone_it_senses_probes_and_counts_timeouts() {
    let provider = provider(17);
    let plant = plant();
    plant.took.store(60_000, Ordering::SeqCst);
    let layer = strict(&provider);
    let handle = layer.handle();
    let service = Boxed::new(layer.layer(plant.script.clone()));
    // Callers who wait until their task's deadline, and those who do not.
    for _ in 0..5 {
        assert!(timeout(secs(2), service.clone().oneshot(until(1, secs(10)))).await.is_err());
    }
    assert_eq!((handle.state(), handle.failures()), (BreakerState::Closed, 0), "they pressed Stop");
    for _ in 0..5 {
        assert!(timeout(secs(10), service.clone().oneshot(until(1, secs(10)))).await.is_err());
    }
    assert_eq!(handle.state(), BreakerState::Open);
    // One probe at a time, although nothing below knows of slots.
    sleep(secs(40)).await;
    let before = plant.calls();
    let crowd = (0..50).map(|_| timeout(secs(20), service.clone().oneshot(request(1))));
    futures_util::future::join_all(crowd).await;
    assert_eq!(plant.calls() - before, 1);
    plant.took.store(10, Ordering::SeqCst);
    plant.down(false);
    let start = Instant::now();
    while call(&service).await.is_err() {
        sleep(ms(100)).await;
    }
    assert!(start.elapsed() < secs(31), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn how_long_a_probe_may_take_is_a_setting() {
    for (longest, least, most) in [(2, 2, 5), (30, 30, 33)] {
        let (provider, plant) = (provider(19), plant());
        // Probes a second apart at the most, so that only their own time counts.
        let settings = BreakerSettings::strict().probes(ms(500), ms(1000)).probe_timeout(secs(longest));
        let layer = BreakerLayer::new(&provider).settings(settings).unwrap();
        let service = stack(layer, &provider, plant.script.clone());
        trip(&service, &plant).await;
        // From here on nobody is answered, and nobody gives up.
        plant.took.store(1_000_000, Ordering::SeqCst);
        let (before, mut waiting, mut sent) = (plant.calls(), Vec::new(), Vec::new());
        while sent.len() < 2 {
            waiting.push(tokio::spawn(service.clone().oneshot(until(1, secs(900)))));
            sleep(ms(10)).await;
            if plant.calls() > before + sent.len() {
                sent.push(Instant::now());
            }
        }
        let apart = sent[1] - sent[0];
        assert!((secs(least)..secs(most)).contains(&apart), "{longest} s: {apart:?}");
        waiting.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

/// A ladder passes over what is broken, and brings its probe itself.
#[tokio::test(start_paused = true)]
async fn a_ladder_skips_a_broken_rung_and_probes_it() {
    let fleet = Fleet::local().seed(18);
    let (first, second) = (fleet.provider("first"), fleet.provider("second"));
    let (one, two) = (plant(), plant());
    two.down(false);
    let layer = strict(&first);
    let handle = layer.handle();
    let rungs = [
        Rung::new(&first, stack(layer, &first, one.script.clone())),
        Rung::new(&second, stack(strict(&second), &second, two.script.clone())).tier(1),
    ];
    let ladder: HashedFailover<_, Request> = HashedFailover::new(rungs).unwrap();
    let ladder = Boxed::new(ladder);
    for id in 0..5000 {
        let reply = ladder.clone().oneshot(request(id)).await.unwrap();
        assert!(reply.status() == 200 || one.calls() > 5, "no task was lost to the trip");
        sleep(ms(100)).await;
    }
    assert!((25..60).contains(&one.calls()), "5, and a probe every 15 to 30 s: {}", one.calls());
    one.down(false);
    let before = two.calls();
    while handle.state() != BreakerState::Closed {
        drop(ladder.clone().oneshot(request(1)).await);
        sleep(ms(100)).await;
    }
    assert!(two.calls() - before < 310);
    let (calls, other) = (one.calls(), two.calls());
    for id in 0..10 {
        sleep(secs(1)).await;
        ladder.clone().oneshot(request(id)).await.unwrap();
    }
    assert_eq!((one.calls() - calls, two.calls() - other), (10, 0));
}

/// A stream proves life by its head.
#[tokio::test(start_paused = true)]
async fn a_stream_closes_it_at_its_head() {
    let provider = provider(19);
    let down = Arc::new(AtomicBool::new(true));
    let inner = tower::service_fn({
        let down = down.clone();
        move |_: Request| {
            let status = if down.load(Ordering::SeqCst) { 500 } else { 200 };
            let body = http_body_util::StreamBody::new(futures_util::stream::pending::<
                Result<http_body::Frame<bytes::Bytes>, std::convert::Infallible>,
            >());
            let reply = http::Response::builder().status(status).body(body).unwrap();
            async move { Ok::<_, std::convert::Infallible>(reply) }
        }
    });
    let layer = strict(&provider);
    let handle = layer.handle();
    let mut service = ServiceBuilder::new()
        .layer(layer)
        .layer(FleetLimitLayer::new(&provider))
        .layer(ClassifyLayer::new(&provider))
        .service(inner);
    while handle.state() == BreakerState::Closed {
        drop(service.ready().await.unwrap().call(request(1)).await);
    }
    down.store(false, Ordering::SeqCst);
    sleep(secs(11)).await;
    let reply = service.ready().await.unwrap().call(request(1)).await.unwrap();
    assert_eq!(handle.state(), BreakerState::Closed, "its body has not ended yet");
    drop(reply);
}
