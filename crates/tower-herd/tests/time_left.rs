//! Calls with little time left: they get no slot and no probe that others could use, and that they are cut is no
//! verdict about the provider.

mod common;

use common::{Boxed, Request, Script, answer, ms, request, secs};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout_at};
use tower::{ServiceBuilder, ServiceExt};
use tower_herd::{
    AttemptTimeoutLayer, BoxError, BreakerLayer, BreakerSettings, ClassifyLayer, Fleet, FleetLimitLayer,
    HashedFailover, Provider, ProviderSettings, Refusal, RefusalKind, RetryAfterLayer, Task,
    breaker::{BreakerHandle, BreakerState},
    failover::Rung,
};

/// A provider whose latency and health are changed as it runs.
struct Plant {
    down: Arc<AtomicBool>,
    took: Arc<AtomicU64>,
    script: Script,
}

fn plant(took: Duration) -> Plant {
    let down = Arc::new(AtomicBool::new(false));
    let took = Arc::new(AtomicU64::new(took.as_millis() as u64));
    let script = Script::new({
        let (down, took) = (down.clone(), took.clone());
        move |_, _| answer(if down.load(SeqCst) { 500 } else { 200 }).after(ms(took.load(SeqCst)))
    });
    Plant { down, took, script }
}

fn provider(ceiling: u32) -> Provider {
    Fleet::local().seed(3).configure("p", ProviderSettings::new().ceiling(ceiling).start(ceiling)).unwrap()
}

/// Breaker, pause, limit, sensor and, if it is given, the timeout of each attempt.
fn stack(provider: &Provider, attempt: Option<Duration>, script: &Script) -> (Boxed, BreakerHandle) {
    let breaker = BreakerLayer::new(provider).strict().unwrap();
    let handle = breaker.handle();
    let gates = ServiceBuilder::new()
        .layer(breaker)
        .layer(RetryAfterLayer::new(provider))
        .layer(FleetLimitLayer::new(provider).until_reply())
        .layer(ClassifyLayer::new(provider).replies());
    let service = match attempt {
        Some(attempt) => {
            Boxed::new(gates.layer(AttemptTimeoutLayer::new(attempt).replies()).service(script.clone()))
        }
        None => Boxed::new(gates.service(script.clone())),
    };
    (service, handle)
}

fn with_time(id: u64, left: Duration) -> Request {
    let mut request = request(id);
    request.extensions_mut().insert(Task::new(id).deadline_in(left));
    request
}

/// A call by somebody who leaves at the deadline.
fn call(
    service: &Boxed,
    left: Duration,
) -> impl Future<Output = Option<Result<u16, BoxError>>> + Send + use<> {
    let service = service.clone();
    async move {
        let end = Instant::now() + left;
        let outcome = timeout_at(end, service.oneshot(with_time(1, left))).await.ok()?;
        Some(outcome.map(|reply| reply.status().as_u16()))
    }
}

async fn learn(service: &Boxed, calls: usize) {
    for _ in 0..calls {
        assert_eq!(call(service, secs(60)).await.unwrap().unwrap(), 200);
    }
}

async fn trip(service: &Boxed, plant: &Plant) {
    plant.down.store(true, SeqCst);
    for _ in 0..5 {
        assert_eq!(call(service, secs(60)).await.unwrap().unwrap(), 500);
    }
    plant.down.store(false, SeqCst);
}

fn refused(outcome: Option<Result<u16, BoxError>>) -> RefusalKind {
    let error = outcome.expect("at once").expect_err("refused");
    Refusal::find(&*error).expect("a refusal").kind
}

#[tokio::test(start_paused = true)]
async fn the_probe_is_left_to_who_has_time_for_its_reply() {
    let (provider, plant) = (provider(10), plant(secs(2)));
    let (service, handle) = stack(&provider, None, &plant.script);
    learn(&service, 10).await;
    trip(&service, &plant).await;
    let before = plant.script.calls();
    // It is due 10 s after the trip at the latest.
    for _ in 0..20 {
        sleep(ms(600)).await;
        assert_eq!(refused(call(&service, secs(1)).await), RefusalKind::Open);
    }
    assert_eq!(plant.script.calls(), before);
    assert_eq!(call(&service, secs(10)).await.unwrap().unwrap(), 200);
    assert_eq!(handle.state(), BreakerState::Closed);
}

/// Before anything is known of what calls take: who waits in a queue, and has waited for most of its time, leaves
/// the probe to who comes later.
#[tokio::test(start_paused = true)]
async fn the_probe_is_left_to_who_comes_later() {
    let (provider, plant) = (provider(10), plant(secs(2)));
    let layer = BreakerLayer::new(&provider).settings(BreakerSettings::strict().open(secs(1))).unwrap();
    let handle = layer.handle();
    let gate = FleetLimitLayer::new(&provider).until_reply();
    let sensor = ClassifyLayer::new(&provider).replies();
    let gates = ServiceBuilder::new().layer(gate).layer(sensor).service(plant.script.clone());
    let service = Boxed::new(ServiceBuilder::new().layer(layer).service(gates.clone()));
    trip(&service, &plant).await;
    // Its open time is over, and the next probe is what everybody waits for.
    sleep(ms(1300)).await;
    let (start, before) = (Instant::now(), plant.script.calls());
    // It goes 5 to 10 s after the trip: these have less than half of their time left then.
    let early = (0..3).map(|_| {
        let waits = Boxed::new(gates.clone());
        tokio::spawn(call(&waits, ms(7300)))
    });
    for task in early.collect::<Vec<_>>() {
        drop(task.await.unwrap());
    }
    assert!(start.elapsed() >= secs(4), "they waited for it: {:?}", start.elapsed());
    assert_eq!(plant.script.calls(), before, "and left it");
    while handle.state() != BreakerState::Closed {
        sleep(ms(100)).await;
        drop(call(&service, secs(10)).await);
        assert!(start.elapsed() < secs(14));
    }
}

/// Better one that may be cut than none for ever: but then it is no verdict, and the gap does not grow.
#[tokio::test(start_paused = true)]
async fn where_nobody_has_time_somebody_probes_all_the_same() {
    let (provider, plant) = (provider(10), plant(secs(2)));
    let (service, handle) = stack(&provider, None, &plant.script);
    learn(&service, 10).await;
    trip(&service, &plant).await;
    plant.took.store(3_600_000, SeqCst);
    let (tripped, before) = (Instant::now(), plant.script.calls());
    while tripped.elapsed() < secs(300) {
        sleep(ms(100)).await;
        drop(call(&service, secs(1)).await);
    }
    let times = plant.script.times(tripped);
    let gaps: Vec<u64> = times[before..].windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.len() >= 12 && gaps.iter().all(|gap| (14_900..21_000).contains(gap)), "{gaps:?}");
    // It works again, more quickly than ever: the next one sees it.
    plant.took.store(10, SeqCst);
    while handle.state() != BreakerState::Closed {
        sleep(ms(100)).await;
        drop(call(&service, secs(1)).await);
        assert!(tripped.elapsed() < secs(322));
    }
}

/// A probe that is cut early is given back: the next goes soon, however rare the failed ones had become.
#[tokio::test(start_paused = true)]
async fn a_probe_that_its_caller_drops_does_not_count() {
    let (provider, plant) = (provider(10), plant(secs(2)));
    let (service, handle) = stack(&provider, None, &plant.script);
    learn(&service, 10).await;
    trip(&service, &plant).await;
    plant.down.store(true, SeqCst);
    // Until the gap between probes is at its longest.
    let start = Instant::now();
    while start.elapsed() < secs(120) {
        sleep(ms(100)).await;
        drop(call(&service, secs(60)).await);
    }
    plant.down.store(false, SeqCst);
    let before = plant.script.calls();
    while plant.script.calls() == before {
        sleep(ms(100)).await;
        let call = call(&service, secs(60));
        // Who presses Stop after a while.
        drop(tokio::time::timeout(ms(500), call).await);
    }
    let stopped = Instant::now();
    while handle.state() != BreakerState::Closed {
        sleep(ms(100)).await;
        drop(call(&service, secs(60)).await);
    }
    assert!(stopped.elapsed() <= secs(13), "{:?}", stopped.elapsed());
}

/// By timeout or by drop, on the first calls (all of which are measured) and later.
#[tokio::test(start_paused = true)]
async fn who_gives_a_call_less_time_than_it_takes_opens_no_breaker() {
    for (attempt, learned) in [(None, 10), (Some(secs(30)), 10), (Some(secs(30)), 200)] {
        let (provider, plant) = (provider(10), plant(secs(1)));
        let (service, handle) = stack(&provider, attempt, &plant.script);
        learn(&service, learned).await;
        let before = plant.script.calls();
        for _ in 0..30 {
            assert!(!matches!(call(&service, ms(300)).await, Some(Ok(_))));
        }
        assert_eq!(plant.script.calls(), before + 30);
        assert_eq!(handle.state(), BreakerState::Closed, "{attempt:?} {learned}");
        // Who had its time, and got nothing: law 14.
        plant.took.store(3_600_000, SeqCst);
        let tasks: Vec<_> = (0..8).map(|_| tokio::spawn(call(&service, secs(5)))).collect();
        for task in tasks {
            drop(task.await.unwrap());
        }
        assert_eq!(handle.state(), BreakerState::Open, "{attempt:?} {learned}");
    }
}

/// The timeout of the attempt is short of what calls take, and the task has time: that is a failure.
#[tokio::test(start_paused = true)]
async fn a_timeout_of_its_own_is_a_verdict() {
    let (provider, plant) = (provider(10), plant(secs(1)));
    let (service, _) = stack(&provider, None, &plant.script);
    learn(&service, 10).await;
    let (service, handle) = stack(&provider, Some(ms(500)), &plant.script);
    for _ in 0..5 {
        assert!(call(&service, secs(60)).await.unwrap().is_err());
    }
    assert_eq!(handle.state(), BreakerState::Open);
}

async fn next_in_line(service: Boxed, plant: &Plant) {
    let start = Instant::now();
    let held = tokio::spawn(call(&service, secs(60)));
    sleep(ms(10)).await;
    let before = plant.script.calls();
    let spawn = |left: Duration| {
        let call = call(&service, left);
        tokio::spawn(async move { (call.await, start.elapsed()) })
    };
    // The slot frees after a second. Then this one has less than half a second left.
    let late = spawn(ms(1400));
    sleep(ms(10)).await;
    let next = spawn(secs(10));
    let (outcome, at) = late.await.unwrap();
    let kind = refused(outcome);
    assert!(matches!(kind, RefusalKind::NoSlot | RefusalKind::NoRung), "{kind:?}");
    assert!(at < ms(1100), "refused at {at:?}");
    let (outcome, at) = next.await.unwrap();
    assert_eq!(outcome.unwrap().unwrap(), 200);
    assert!(at < ms(2200), "the slot went on at once: {at:?}");
    assert_eq!(held.await.unwrap().unwrap().unwrap(), 200);
    assert_eq!(plant.script.calls(), before + 1);
}

#[tokio::test(start_paused = true)]
async fn a_slot_is_not_given_to_who_has_no_time_left_to_use_it() {
    let (provider, plant) = (provider(1), plant(secs(1)));
    let (service, _) = stack(&provider, None, &plant.script);
    learn(&service, 10).await;
    next_in_line(service, &plant).await;
}

#[tokio::test(start_paused = true)]
async fn nor_in_a_ladder() {
    let (provider, plant) = (provider(1), plant(secs(1)));
    let (service, _) = stack(&provider, None, &plant.script);
    let ladder = HashedFailover::new([Rung::new(&provider, service)]).unwrap();
    let service = Boxed::new(ladder);
    learn(&service, 10).await;
    next_in_line(service, &plant).await;
}

/// While nothing is known of what calls take, any time is enough.
#[tokio::test(start_paused = true)]
async fn who_may_be_in_time_is_not_refused() {
    let (provider, plant) = (provider(1), plant(secs(1)));
    let (service, _) = stack(&provider, None, &plant.script);
    let first = tokio::spawn(call(&service, secs(60)));
    sleep(ms(10)).await;
    plant.took.store(50, SeqCst);
    assert_eq!(call(&service, ms(1100)).await.unwrap().unwrap(), 200);
    first.await.unwrap().unwrap().unwrap();
}
