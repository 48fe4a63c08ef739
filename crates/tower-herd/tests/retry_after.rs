//! The pause, as callers see it.

mod common;

use common::{Script, answer, ms, request, secs};
use std::time::Duration;
use tokio::time::Instant;
use tower::{Layer, ServiceExt, util::BoxCloneService};
use tower_herd::{Fleet, PauseReason, Refusal, RefusalKind, RetryAfterLayer, Task};

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
