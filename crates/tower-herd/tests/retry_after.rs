//! The pause, as callers see it.

mod common;

use common::{Script, answer, ms, request, secs};
use std::{
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn, util::BoxCloneService};
use tower_herd::{
    ClassifyLayer, Fleet, FleetLimitLayer, HashedFailover, PauseReason, Provider, ProviderSettings, Refusal,
    RefusalKind, RetryAfterLayer, Task,
    failover::Rung,
    observe::{Event, Observe},
};

type Body = BoxCloneService<common::Request, http::Response<String>, tower_herd::BoxError>;

fn paused_service(layer: &RetryAfterLayer, script: &Script) -> Body {
    BoxCloneService::new(layer.layer(script.clone()))
}

#[tokio::test(start_paused = true)]
async fn one_reply_pauses_all_who_share_the_provider_and_nobody_is_early() {
    let provider = Fleet::local().provider("p");
    let script =
        Script::new(
            |nth, _| if nth == 0 { answer(429).header("retry-after", 7) } else { answer(200).after(ms(200)) },
        );
    let (one, other) = (
        paused_service(&RetryAfterLayer::new(&provider), &script),
        paused_service(&RetryAfterLayer::new(&provider.clone()), &script),
    );
    let start = Instant::now();
    assert_eq!(one.oneshot(request(1)).await.unwrap().status(), 429);
    let waiters: Vec<_> = (0..20).map(|i| tokio::spawn(other.clone().oneshot(request(i)))).collect();
    for waiter in waiters {
        assert_eq!(waiter.await.unwrap().unwrap().status(), 200);
    }
    let times = script.times(start);
    assert_eq!(times.len(), 21);
    assert!(times[1..].iter().all(|at| *at >= 7000), "{times:?}");
    // and not at the same instant either
    let at_once = times[1..].iter().filter(|at| **at < 7100).count();
    assert!(at_once <= 4, "{times:?}");
    assert!(*times.last().unwrap() <= 7000 + 3500 + 100, "{times:?}");
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_does_not_fit_is_answered_at_once_with_its_instant() {
    let provider = Fleet::local().provider("p");
    let script = Script::always(answer(200));
    provider.pause_for(secs(3600));
    let start = Instant::now();
    let impatient = paused_service(&RetryAfterLayer::new(&provider).patience(secs(5)), &script);
    let error = impatient.oneshot(request(1)).await.unwrap_err();
    let refusal = Refusal::find(&*error).unwrap();
    assert_eq!((refusal.kind, refusal.retry_at), (RefusalKind::Paused, Some(start + secs(3600))));
    // no patience given: the task's deadline is one
    let mut late = request(2);
    late.extensions_mut().insert(Task::new(2).deadline_in(secs(30)));
    let patient = paused_service(&RetryAfterLayer::new(&provider), &script);
    let error = patient.oneshot(late).await.unwrap_err();
    assert_eq!(Refusal::find(&*error).unwrap().retry_at, Some(start + secs(3600)));
    assert_eq!((Instant::now() - start, script.calls()), (Duration::ZERO, 0));
}

// ssmanji89/toast-pos-mcp#25, KarpelesLab/teamclaude#309 (#296): a limit of one model or account
// stops that scope, and no other.
#[tokio::test(start_paused = true)]
async fn a_scope_is_paused_alone() {
    let provider = Fleet::local().provider("p");
    let (large, small) = (provider.scope("large"), provider.scope("small"));
    let script =
        Script::new(|nth, _| if nth == 0 { answer(429).header("retry-after", 60) } else { answer(200) });
    paused_service(&RetryAfterLayer::new(&large), &script).oneshot(request(1)).await.unwrap();
    assert_eq!(large.paused_until().map(|(_, reason)| reason), Some(PauseReason::Hint));
    assert!(small.paused_until().is_none() && provider.paused_until().is_none());
    let start = Instant::now();
    paused_service(&RetryAfterLayer::new(&small), &script).oneshot(request(2)).await.unwrap();
    assert_eq!(Instant::now(), start);
}

// KarpelesLab/teamclaude#309 (#307): a 429 without a hint for one refused model paused the account.
#[tokio::test(start_paused = true)]
async fn a_bare_429_pauses_the_provider_only_after_two_scopes() {
    let provider = Fleet::local().provider("p");
    let script = Script::always(answer(429));
    let first = provider.scope("one");
    paused_service(&RetryAfterLayer::new(&first), &script).oneshot(request(1)).await.unwrap();
    assert!(provider.paused_until().is_none() && first.paused_until().is_some());
    tokio::time::advance(secs(2)).await;
    paused_service(&RetryAfterLayer::new(&first), &script).oneshot(request(1)).await.unwrap();
    assert!(provider.paused_until().is_none(), "the same scope twice is still one");
    paused_service(&RetryAfterLayer::new(&provider.scope("two")), &script).oneshot(request(1)).await.unwrap();
    assert_eq!(provider.paused_until().map(|(_, reason)| reason), Some(PauseReason::Bare));
}

#[tokio::test(start_paused = true)]
async fn a_bare_429_waits_a_second_then_twice_that_until_a_success() {
    let provider = Fleet::local().provider("p");
    let script = Script::new(|nth, _| if nth == 3 { answer(200) } else { answer(429) });
    let service = paused_service(&RetryAfterLayer::new(&provider), &script);
    let start = Instant::now();
    for _ in 0..6 {
        service.clone().oneshot(request(1)).await.unwrap();
    }
    let times = script.times(start);
    let gaps: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    for (gap, expected) in gaps.iter().zip([1000, 2000, 4000, 0, 1000]) {
        assert!((expected..expected + 1100).contains(gap), "{gaps:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_pause_is_probed_sparsely_and_ends_with_the_first_success() {
    let provider = Fleet::local().provider("p");
    let script = Script::new(|nth, _| match nth {
        0 => answer(429).header("retry-after", 48 * 3600),
        1 | 2 => answer(429).header("retry-after", 3600),
        _ => answer(200),
    });
    let service = paused_service(&RetryAfterLayer::new(&provider).patience(Duration::ZERO), &script);
    service.clone().oneshot(request(0)).await.unwrap();
    let start = Instant::now();
    while provider.paused_until().is_some() {
        tokio::time::advance(secs(10)).await;
        service.clone().oneshot(request(1)).await.ok();
        assert!(Instant::now() - start < secs(24 * 3600), "never probed");
    }
    let hours: Vec<u64> = script.times(start)[1..].iter().map(|at| at / 1000).collect();
    assert_eq!(hours.len(), 3, "{hours:?}");
    // 24 h at most, a twentieth of it apart
    assert!(hours.windows(2).all(|pair| pair[1] - pair[0] >= 300), "{hours:?}");
    assert!((4320..4340).contains(&hours[0]), "{hours:?}");
}

#[tokio::test(start_paused = true)]
async fn an_operator_pauses_and_clears() {
    let provider = Fleet::local().provider("p");
    let script = Script::always(answer(200));
    let service = paused_service(&RetryAfterLayer::new(&provider), &script);
    provider.pause_for(secs(100));
    let waiter = tokio::spawn(service.oneshot(request(1)));
    tokio::time::sleep(secs(10)).await;
    assert_eq!(script.calls(), 0);
    let cleared = Instant::now();
    provider.clear_pause();
    waiter.await.unwrap().unwrap();
    assert!(Instant::now() - cleared <= secs(3), "what waited leaves, spread out");
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_is_dropped_leaves_nothing_behind() {
    let provider = Fleet::local().provider("p");
    let script = Script::always(answer(200));
    let service = paused_service(&RetryAfterLayer::new(&provider), &script);
    provider.pause_for(secs(10));
    for _ in 0..100 {
        tokio::time::timeout(ms(1), service.clone().oneshot(request(1))).await.ok();
    }
    assert_eq!((provider.waiting(), provider.in_flight()), (0, 0));
    service.oneshot(request(1)).await.unwrap();
    assert_eq!((script.calls(), provider.in_flight()), (1, 0));
}

fn limited(provider: &Provider, script: &Script) -> Body {
    let layers = ServiceBuilder::new()
        .layer(RetryAfterLayer::new(provider))
        .layer(FleetLimitLayer::new(provider).until_reply())
        .layer(ClassifyLayer::new(provider).replies());
    BoxCloneService::new(layers.service(script.clone()))
}

fn patient(id: u64) -> common::Request {
    let mut request = request(id);
    request.extensions_mut().insert(Task::new(id).deadline_in(secs(7200)));
    request
}

// Law 1: a probe that nobody took belongs to the pause that it was of.
#[tokio::test(start_paused = true)]
async fn a_short_pause_is_not_probed_by_what_a_long_one_left_over() {
    let provider = Fleet::local().provider("p");
    let script = Script::always(answer(200));
    provider.pause_for(secs(600));
    tokio::time::advance(secs(601)).await;
    provider.pause_for(secs(10));
    let start = Instant::now();
    limited(&provider, &script).oneshot(request(1)).await.unwrap();
    assert!(start.elapsed() >= secs(10), "early: {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn settings_that_come_during_a_pause_do_not_end_it() {
    for queued in [false, true] {
        let provider = Fleet::local().provider("p");
        let script = Script::always(answer(200));
        provider.pause_for(secs(10));
        let start = Instant::now();
        let call = limited(&provider, &script).oneshot(request(1));
        let settings = ProviderSettings::new().ceiling(5);
        if queued {
            let call = tokio::spawn(call);
            tokio::time::sleep(secs(1)).await;
            provider.configure(settings).unwrap();
            call.await.unwrap().unwrap();
        } else {
            provider.configure(settings).unwrap();
            call.await.unwrap();
        }
        assert!(start.elapsed() >= secs(10), "queued {queued}: early: {:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_scope_that_is_cleared_wakes_who_waits_for_it() {
    for by_success in [false, true] {
        let provider = Fleet::local().provider("p").scope("model");
        let script = Script::always(answer(200));
        let service = limited(&provider, &script);
        let ladder = HashedFailover::new([Rung::new(&provider, service.clone())]).unwrap();
        provider.pause_for(secs(3600));
        let start = Instant::now();
        let waiters = [
            tokio::spawn(service.clone().oneshot(patient(1))),
            tokio::spawn(service.oneshot(patient(2))),
            tokio::spawn(ladder.clone().oneshot(patient(3))),
            tokio::spawn(ladder.oneshot(patient(4))),
        ];
        let most = if by_success {
            secs(305) // the probe's success
        } else {
            tokio::time::sleep(secs(1)).await;
            provider.clear_pause();
            secs(3)
        };
        for waiter in waiters {
            waiter.await.unwrap().unwrap();
        }
        assert!(start.elapsed() <= most, "by success {by_success}: {:?}", start.elapsed());
        assert_eq!((script.calls(), provider.waiting(), provider.in_flight()), (4, 0, 0));
    }
}

// Law 2 holds for probes too: calls of other scopes may fill the ceiling.
#[tokio::test(start_paused = true)]
async fn a_probe_takes_a_slot() {
    let provider = Fleet::local().configure("p", ProviderSettings::new().ceiling(1)).unwrap();
    let model = provider.scope("model");
    let script = Script::always(answer(200).after(secs(100)));
    model.pause_for(secs(3600));
    tokio::time::advance(secs(400)).await;
    let other = tokio::spawn(limited(&provider, &script).oneshot(request(1)));
    tokio::time::sleep(secs(1)).await;
    let start = Instant::now();
    limited(&model, &script).oneshot(patient(2)).await.unwrap();
    other.await.unwrap().unwrap();
    assert_eq!(script.peak.load(std::sync::atomic::Ordering::SeqCst), 1);
    assert!(start.elapsed() < secs(300), "it goes when there is room: {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn where_provider_and_scope_are_paused_the_probe_is_one_of_both() {
    let provider = Fleet::local().provider("p");
    let model = provider.scope("model");
    let script = Script::always(answer(200));
    provider.pause_for(secs(3600));
    model.pause_for(secs(7000));
    let start = Instant::now();
    limited(&model, &script).oneshot(patient(1)).await.unwrap();
    assert!(start.elapsed() >= secs(350) && start.elapsed() <= secs(355), "{:?}", start.elapsed());
    assert!(model.paused_until().is_none());
}

// Its head has named the pause; that its caller leaves while the body is being read changes nothing.
#[tokio::test(start_paused = true)]
async fn the_pause_of_a_429_outlives_the_caller_that_met_it() {
    type Frames = futures_util::stream::Pending<Result<http_body::Frame<bytes::Bytes>, std::io::Error>>;
    let provider = Fleet::local().provider("p");
    let service = ClassifyLayer::new(&provider).layer(service_fn(|_: common::Request| async {
        let body = http_body_util::StreamBody::new(Frames::clone(&futures_util::stream::pending()));
        let reply = http::Response::builder().status(429).header("retry-after", 30);
        Ok::<_, std::io::Error>(reply.body(body).unwrap())
    }));
    assert!(tokio::time::timeout(ms(100), service.oneshot(request(1))).await.is_err());
    assert!(provider.paused_until().is_some());
}

/// Ready itself; its clones never are.
struct Alone(bool);

impl Clone for Alone {
    fn clone(&self) -> Self {
        Alone(false)
    }
}

impl Service<common::Request> for Alone {
    type Response = common::Response;
    type Error = tower_herd::BoxError;
    type Future = std::future::Ready<Result<common::Response, tower_herd::BoxError>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), tower_herd::BoxError>> {
        if self.0 { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
    fn call(&mut self, _: common::Request) -> Self::Future {
        std::future::ready(Ok(common::Response::default()))
    }
}

// Laws 10 and 11: nor is a slot held for ever by who waits for its service.
#[tokio::test(start_paused = true)]
async fn a_service_that_never_gets_ready_is_given_up_at_the_deadline() {
    let provider = Fleet::local().configure("p", ProviderSettings::new().ceiling(1)).unwrap();
    let task = || {
        let mut request = request(1);
        request.extensions_mut().insert(Task::new(1).deadline_in(secs(10)));
        request
    };
    let mut limit = FleetLimitLayer::new(&provider).until_reply().layer(Alone(true));
    let mut pause = RetryAfterLayer::new(&provider).layer(Alone(true));
    let mut ladder = HashedFailover::new([Rung::new(&provider, Alone(false))]).unwrap();
    for which in 0..3 {
        provider.pause_for(secs(1));
        let start = Instant::now();
        let refusal = tokio::time::timeout(secs(600), async {
            match which {
                0 => limit.ready().await?.call(task()).await,
                1 => pause.ready().await?.call(task()).await,
                _ => ladder.ready().await?.call(task()).await,
            }
        });
        let error = refusal.await.expect("in time").unwrap_err();
        assert_eq!(Refusal::find(&*error).map(|refusal| refusal.kind), Some(RefusalKind::Deadline));
        assert!((secs(10)..secs(11)).contains(&start.elapsed()), "{which}: {:?}", start.elapsed());
        assert_eq!(provider.in_flight(), 0, "{which}");
    }
}

// No lock is held while the observer is told: it may ask for anything.
#[tokio::test(start_paused = true)]
async fn an_observer_may_call_back() {
    #[derive(Clone, Default)]
    struct Nosy(Arc<Mutex<Option<Fleet>>>);
    impl Observe for Nosy {
        fn observe(&self, _: &Event<'_>) {
            let Some(fleet) = self.0.lock().unwrap().clone() else { return };
            let provider = fleet.provider("p");
            let scope = provider.scope("model");
            drop(format!("{fleet:?} {provider:?} {scope:?} {}", provider.waiting()));
            provider.configure(ProviderSettings::new().start(50)).unwrap();
        }
    }
    let nosy = Nosy::default();
    let fleet = Fleet::local().observer(nosy.clone());
    *nosy.0.lock().unwrap() = Some(fleet.clone());
    let provider = fleet.configure("p", ProviderSettings::new().start(50)).unwrap();
    let script = Script::new(|nth, _| match nth % 4 {
        0 => answer(429).header("retry-after", 1),
        1 => answer(529).header("retry-after", 1),
        2 => answer(402),
        _ => answer(500),
    });
    for provider in [provider.scope("model"), provider] {
        for i in 0..8 {
            // Answered or refused, but not stuck.
            drop(limited(&provider, &script).oneshot(request(i)).await);
            provider.clear_pause();
            provider.pause_for(secs(1));
        }
    }
}

// A pause of one scope ends in a line too, whether by itself or because somebody cleared it.
#[tokio::test(start_paused = true)]
async fn the_waiters_of_a_scope_leave_one_by_one() {
    use tower_herd::{FleetLimitLayer, ProviderSettings};
    for cleared in [false, true] {
        let settings = ProviderSettings::new().ceiling(100).aborts(true);
        let scope = Fleet::local().configure("p", settings).unwrap().scope("model");
        let script = Script::always(answer(200).after(ms(1)));
        let limited = FleetLimitLayer::new(&scope).layer(script.clone());
        let service = RetryAfterLayer::new(&scope).layer(limited);
        scope.pause_for(secs(10));
        let start = Instant::now();
        let calls: Vec<_> = (0..100).map(|i| tokio::spawn(service.clone().oneshot(request(i)))).collect();
        let end = if cleared { 4000 } else { 10_000 };
        if cleared {
            tokio::time::sleep(ms(end)).await;
            scope.clear_pause();
        }
        for call in calls {
            assert_eq!(call.await.unwrap().unwrap().status(), 200);
        }
        let times = script.times(start);
        assert!(times.iter().all(|at| *at >= end), "{times:?}");
        let most =
            times.iter().map(|from| times.iter().filter(|at| (*from..from + 100).contains(*at)).count());
        let (peak, over) = if cleared { (12, 1000) } else { (5, 5000) };
        assert!(most.max().unwrap() <= peak, "evenly over {over} ms: {times:?}");
        assert!(*times.last().unwrap() <= end + over + 100, "{times:?}");
    }
}
