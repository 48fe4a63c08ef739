//! Public reports about breakers that opened for the wrong reason, or never closed: what ours does there.

mod common;

use common::{Boxed, Request, Response, Script, answer, ms, request, secs, until};
use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout};
use tower::{ServiceBuilder, ServiceExt, service_fn};
use tower_herd::{
    BoxError, BreakerLayer, ClassifyLayer, Fleet, FleetLimitLayer, HashedFailover, JitteredRetryLayer,
    Provider, ProviderSettings, RetryAfterLayer, Task,
    breaker::{BreakerHandle, BreakerState},
    failover::Rung,
    retry::Unlimited,
};

fn strict(provider: &Provider) -> (BreakerLayer, BreakerHandle) {
    let layer = BreakerLayer::new(provider).strict().unwrap();
    let handle = layer.handle();
    (layer, handle)
}

/// A rung with a strict breaker.
fn rung<S>(provider: &Provider, inner: S) -> (Boxed, BreakerHandle)
where
    S: tower::Service<Request, Response = Response> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send,
{
    let (layer, handle) = strict(provider);
    let service = ServiceBuilder::new()
        .layer(layer)
        .layer(RetryAfterLayer::new(provider))
        .layer(FleetLimitLayer::new(provider).until_reply())
        .layer(ClassifyLayer::new(provider).replies())
        .service(inner);
    (Boxed::new(service), handle)
}

/// One rung a tier.
fn ladder(rungs: impl IntoIterator<Item = (Provider, Boxed)>) -> Boxed {
    let rungs = rungs
        .into_iter()
        .zip(0..)
        .map(|((provider, service), tier)| Rung::<_, Request>::new(&provider, service).tier(tier));
    Boxed::new(HashedFailover::new(rungs.collect::<Vec<_>>()).unwrap())
}

async fn trip(service: &Boxed, handle: &BreakerHandle) {
    while handle.state() == BreakerState::Closed {
        drop(service.clone().oneshot(request(1)).await);
    }
}

// rohitg00/agentmemory#1075: three 429s opened the circuit, and 113 calls failed.
#[tokio::test(start_paused = true)]
async fn agentmemory_1075_429s_open_no_breaker_pause_and_cut_once() {
    for hint in [None, Some(2)] {
        let fleet = Fleet::local().seed(1);
        let provider = fleet.configure("p", ProviderSettings::new().ceiling(10)).unwrap();
        // Ten at once are too many: four of them are turned away. And later, everybody.
        let script = Script::new(move |nth, _| match nth {
            0..16 => answer(200).after(ms(500)),
            120.. => answer(200),
            _ => match hint {
                None => answer(429).after(ms(50)),
                Some(hint) => answer(429).after(ms(50)).header("retry-after", hint),
            },
        });
        let (service, handle) = rung(&provider, script.clone());
        for _ in 0..2 {
            let ten = (0..10).map(|id| service.clone().oneshot(request(id)));
            assert!(futures_util::future::join_all(ten).await.iter().all(Result::is_ok));
        }
        assert_eq!(provider.throttled(), 4);
        assert!((6..=7).contains(&provider.ceiling()), "one cut for the four, to what was served");
        assert!(hint.is_none() || provider.paused_until().is_some());
        while script.calls() < 120 {
            let reply = service.clone().oneshot(request(1)).await.unwrap();
            assert_eq!(reply.status(), 429, "no call fails at a breaker");
        }
        assert_eq!((handle.state(), handle.failures()), (BreakerState::Closed, 0));
        assert_eq!(service.oneshot(request(2)).await.unwrap().status(), 200);
    }
}

// voidmind-io/voidllm#184, api7/aisix#46: a 429 was recorded as a success, and nobody failed over.
#[tokio::test(start_paused = true)]
async fn voidllm_184_aisix_46_a_429_is_neither_success_nor_failure_and_goes_on() {
    let fleet = Fleet::local().seed(2);
    let (first, second) = (fleet.provider("first"), fleet.provider("second"));
    // Four failures, a 429 without a wait to speak of, and a failure: five in a row but for the 429.
    let script = Script::new(|nth, _| match nth {
        4 => answer(429).header("retry-after", 60),
        _ => answer(500),
    });
    let (one, handle) = rung(&first, script.clone());
    let (two, other) = rung(&second, Script::always(answer(200)));
    let ladder = ladder([(first.clone(), one), (second, two)]);
    for id in 0..5 {
        assert_eq!(ladder.clone().oneshot(request(id)).await.unwrap().status(), 200);
    }
    assert_eq!((script.calls(), handle.state(), handle.failures()), (5, BreakerState::Closed, 4));
    sleep(secs(61)).await;
    assert_eq!(ladder.clone().oneshot(request(5)).await.unwrap().status(), 200);
    assert_eq!((script.calls(), handle.state()), (6, BreakerState::Open), "it did not count as a success");
    assert_eq!(other.state(), BreakerState::Closed);
}

/// Answers 500 five times; then what comes is held for as long as `hold` says, and is well.
fn recovering(
    hold: Duration,
) -> (
    impl tower::Service<Request, Response = Response, Error = BoxError, Future: Send> + Clone + Send + 'static,
    Arc<AtomicUsize>,
) {
    let calls = Arc::new(AtomicUsize::new(0));
    let seen = calls.clone();
    let service = service_fn(move |_: Request| {
        let nth = seen.fetch_add(1, Ordering::SeqCst);
        async move {
            if nth >= 5 {
                sleep(hold).await;
            }
            let status = if nth < 5 { 500 } else { 200 };
            Ok::<_, BoxError>(http::Response::builder().status(status).body(String::new())?)
        }
    });
    (service, calls)
}

// diegosouzapw/OmniRoute#13836: a lost probe kept the breaker half open for six days.
// monix/monix#1080, opossum#119: so did a cancelled one.
#[tokio::test(start_paused = true)]
async fn omniroute_13836_monix_1080_opossum_119_a_probe_dropped_at_any_point_is_followed_by_another() {
    for dropped_after in [0, 1, 500, 999] {
        let provider = Fleet::local().seed(3).provider("p");
        let (inner, calls) = recovering(secs(1));
        let (service, handle) = rung(&provider, inner);
        trip(&service, &handle).await;
        let start = Instant::now();
        for round in 1..=5 {
            // The probe of this round is given up by its caller.
            while calls.load(Ordering::SeqCst) < 5 + round {
                sleep(ms(100)).await;
                let call = service.clone().oneshot(until(1, secs(100)));
                drop(timeout(ms(dropped_after), call).await);
            }
            assert_eq!(handle.state(), BreakerState::Open, "dropped, it is no verdict");
            assert!(start.elapsed() < secs(11) * round as u32, "not put off either: {:?}", start.elapsed());
        }
        while handle.state() != BreakerState::Closed {
            drop(service.clone().oneshot(until(1, secs(100))).await);
            sleep(ms(100)).await;
        }
        assert!(start.elapsed() < secs(67), "{:?}", start.elapsed());
        // The slots of the dropped calls linger, and then all are back.
        sleep(secs(11)).await;
        assert_eq!(provider.in_flight(), 0);
    }
}

// The same report: the probe never ended at all.
#[tokio::test(start_paused = true)]
async fn omniroute_13836_a_probe_that_never_ends_is_given_up_and_another_goes() {
    let provider = Fleet::local().seed(4).provider("p");
    let calls = Arc::new(AtomicUsize::new(0));
    let seen = calls.clone();
    let inner = service_fn(move |_: Request| {
        let nth = seen.fetch_add(1, Ordering::SeqCst);
        async move {
            if nth == 5 {
                pending::<()>().await;
            }
            let status = if nth < 5 { 500 } else { 200 };
            Ok::<_, BoxError>(http::Response::builder().status(status).body(String::new())?)
        }
    });
    let (service, handle) = rung(&provider, inner);
    trip(&service, &handle).await;
    let start = Instant::now();
    let mut hanging = Vec::new();
    while handle.state() != BreakerState::Closed {
        sleep(ms(100)).await;
        let call = tokio::spawn(service.clone().oneshot(until(1, secs(10_000))));
        tokio::task::yield_now().await;
        if !call.is_finished() {
            hanging.push(call);
        }
        assert!(calls.load(Ordering::SeqCst) <= 7, "one at a time");
        assert!(start.elapsed() < secs(75), "stuck");
    }
    assert!(start.elapsed() > secs(35), "it had its time: {:?}", start.elapsed());
    assert!(hanging.iter().any(|call| !call.is_finished()));
    // What the lost one gives back at last is not another's.
    hanging.iter().for_each(tokio::task::JoinHandle::abort);
    sleep(secs(15)).await;
    assert_eq!((handle.state(), provider.in_flight()), (BreakerState::Closed, 0));
}

// joshrotenberg/tower-resilience#382, #407: half open, any number of clones probed at once.
#[tokio::test(start_paused = true)]
async fn tower_resilience_382_407_a_hundred_clones_send_one_probe() {
    for alone in [false, true] {
        let provider = Fleet::local().seed(5).provider("p");
        let (inner, calls) = recovering(secs(1));
        let (service, handle) = if alone {
            let (layer, handle) = strict(&provider);
            (Boxed::new(tower::Layer::layer(&layer, inner)), handle)
        } else {
            rung(&provider, inner)
        };
        trip(&service, &handle).await;
        sleep(secs(11)).await;
        let clones = (0..100).map(|id| service.clone().oneshot(request(id)));
        let outcomes = futures_util::future::join_all(clones).await;
        assert_eq!(calls.load(Ordering::SeqCst), 6, "alone: {alone}");
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
        // Now all may go.
        let clones = (0..10).map(|id| service.clone().oneshot(request(id)));
        assert!(futures_util::future::join_all(clones).await.iter().all(Result::is_ok));
    }
}

// samosa-ai-com/opencode-go-multi-auth#6: one poison request opened the breaker of every key in turn.
#[tokio::test(start_paused = true)]
async fn opencode_go_multi_auth_6_a_poison_request_opens_no_second_rung() {
    let fleet = Fleet::local().seed(6);
    let api = fleet.provider("api");
    let (keys, apart) =
        (["a", "b", "c"].map(|key| api.scope(key)), ["x", "y", "z"].map(|n| fleet.provider(n)));
    for providers in [keys, apart] {
        let script =
            Script::new(|_, request| answer(if request.uri().path() == "/poison" { 500 } else { 200 }));
        let rungs: Vec<_> = providers.iter().map(|provider| rung(provider, script.clone())).collect();
        let handles: Vec<_> = rungs.iter().map(|(_, handle)| handle.clone()).collect();
        let services = rungs.into_iter().map(|(service, _)| service);
        let ladder = ladder(providers.iter().cloned().zip(services));
        let poison = || {
            let mut request = request(1);
            *request.uri_mut() = "http://placeholder.example/poison".parse().unwrap();
            request
        };
        let task = Task::new("poison").deadline_in(secs(600)).allowance(1000);
        for _ in 0..30 {
            let mut request = poison();
            request.extensions_mut().insert(task.clone());
            assert_eq!(ladder.clone().oneshot(request).await.unwrap().status(), 500);
        }
        let states: Vec<_> = handles.iter().map(BreakerHandle::state).collect();
        assert_eq!(states, [BreakerState::Open, BreakerState::Closed, BreakerState::Closed]);
        assert_eq!([handles[1].failures(), handles[2].failures()], [0, 0]);
        assert_eq!(ladder.clone().oneshot(request(2)).await.unwrap().status(), 200, "others are served");
        // The same failures of tasks that come here first do open it.
        for id in 100..105 {
            let mut request = poison();
            request.extensions_mut().insert(Task::new(id).allowance(1));
            drop(ladder.clone().oneshot(request).await);
        }
        assert_eq!(handles[1].state(), BreakerState::Open);
        // And a task that went well somewhere begins anew.
        let mut good = request(3);
        good.extensions_mut().insert(task.clone());
        assert_eq!(ladder.clone().oneshot(good).await.unwrap().status(), 200);
        let mut request = poison();
        request.extensions_mut().insert(task.clone());
        drop(ladder.clone().oneshot(request).await);
        assert_eq!(handles[2].failures(), 1);
    }
}

// openabdev/openab#969, HybridAIOne/hybridclaw#413: whoever was skipped stamped the timer anew, and it never ended.
#[tokio::test(start_paused = true)]
async fn openab_969_hybridclaw_413_skips_do_not_prolong_it() {
    let provider = Fleet::local().seed(7).provider("p");
    let (inner, calls) = recovering(Duration::ZERO);
    let (service, handle) = rung(&provider, inner);
    trip(&service, &handle).await;
    let (until_, start) = (handle.open_until(), Instant::now());
    while handle.state() == BreakerState::Open {
        assert_eq!(handle.open_until(), until_, "after {:?}", start.elapsed());
        let many = (0..20).map(|id| service.clone().oneshot(request(id)));
        futures_util::future::join_all(many).await;
        sleep(ms(50)).await;
    }
    assert!(start.elapsed() < secs(11), "nor the first probe: {:?}", start.elapsed());
    assert_eq!((handle.state(), calls.load(Ordering::SeqCst) > 6), (BreakerState::Closed, true));
}

// BerriAI/litellm#5225: one user's filtered prompt cooled the deployment for all.
#[tokio::test(start_paused = true)]
async fn litellm_5225_rejected_requests_open_nothing() {
    for status in [400, 404, 413, 422] {
        let provider = Fleet::local().provider("p");
        let script = Script::always(answer(status));
        let (service, handle) = rung(&provider, script.clone());
        for _ in 0..100 {
            assert_eq!(service.clone().oneshot(request(1)).await.unwrap().status(), status);
        }
        assert_eq!((handle.state(), handle.failures()), (BreakerState::Closed, 0), "{status}");
        assert_eq!(provider.paused_until(), None);
    }
}

// BerriAI/litellm#17464: one of one failed, which is all of them.
#[tokio::test(start_paused = true)]
async fn litellm_17464_one_of_one_is_not_enough() {
    let provider = Fleet::local().provider("p");
    let layer = BreakerLayer::new(&provider);
    let handle = layer.handle();
    let service = Boxed::new(tower::Layer::layer(&layer, Script::always(answer(500))));
    for n in 1..18 {
        service.clone().oneshot(request(1)).await.unwrap();
        assert_eq!((handle.state(), handle.failures()), (BreakerState::Closed, n));
    }
    service.oneshot(request(1)).await.unwrap();
    assert_eq!(handle.state(), BreakerState::Open);
}

// BerriAI/litellm#32574: the second failure of one request was taken for a repetition, and not recorded.
#[tokio::test(start_paused = true)]
async fn litellm_32574_each_failed_attempt_of_one_request_counts() {
    let provider = Fleet::local().seed(8).provider("p");
    let script = Script::always(answer(500));
    let (service, handle) = rung(&provider, script.clone());
    let retry = JitteredRetryLayer::new().attempts(4).budget(Unlimited).seed(1);
    let service = Boxed::new(tower::Layer::layer(&retry, ladder([(provider.clone(), service)])));
    let mut one = request(1);
    one.extensions_mut().insert(Task::new(1).deadline_in(secs(600)).allowance(10));
    service.oneshot(one).await.unwrap();
    assert_eq!((script.calls(), handle.failures()), (4, 4));
}

// OmniRoute#13836 again: refusals were counted as failures of the provider (49,607 of them).
#[tokio::test(start_paused = true)]
async fn omniroute_13836_our_own_refusals_touch_no_statistic() {
    let provider = Fleet::local().seed(9).provider("p");
    let well = Arc::new(AtomicBool::new(false));
    let now = well.clone();
    let script = Script::new(move |_, _| answer(if now.load(Ordering::SeqCst) { 200 } else { 500 }));
    let (service, handle) = rung(&provider, script.clone());
    trip(&service, &handle).await;
    for _ in 0..10_000 {
        assert!(service.clone().oneshot(request(1)).await.is_err());
    }
    well.store(true, Ordering::SeqCst);
    while handle.state() != BreakerState::Closed {
        sleep(ms(100)).await;
        drop(service.clone().oneshot(request(1)).await);
    }
    assert_eq!((script.calls(), handle.failures()), (6, 0));
}
