//! A stack in front of a server that has a stack itself: its refusals are no failures out here.

mod common;

use common::{Boxed, Request, Response, Script, answer, ms, request, secs};
use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep};
use tower::{ServiceBuilder, ServiceExt, service_fn};
use tower_herd::{
    BoxError, BreakerLayer, BudgetLayer, Classify, ClassifyLayer, Executed, Fleet, FleetLimitLayer,
    HttpClassify, JitteredRetryLayer, Kind, Provider, Pushback, Refusal, RefusalKind, ResendAdvice,
    RetryAfterLayer,
    breaker::{BreakerHandle, BreakerState},
    refusal::{error_reply, grpc_error_reply},
    signal::Origin,
};

fn gates<S>(provider: &Provider, inner: S) -> (Boxed, BreakerHandle)
where
    S: tower::Service<Request, Response = Response> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send,
{
    let breaker = BreakerLayer::new(provider).strict().unwrap();
    let handle = breaker.handle();
    let service = ServiceBuilder::new()
        .layer(breaker)
        .layer(BudgetLayer::new(provider))
        .layer(RetryAfterLayer::new(provider))
        .layer(FleetLimitLayer::new(provider).until_reply())
        .layer(ClassifyLayer::new(provider).replies())
        .service(inner);
    (Boxed::new(service), handle)
}

type Render = fn(&(dyn std::error::Error + 'static)) -> Response;

/// The server: its own stack, whose errors become replies.
fn server(
    inner: Boxed,
    render: Render,
) -> impl tower::Service<Request, Response = Response, Error = Infallible, Future: Send> + Clone + Send {
    service_fn(move |request: Request| {
        let inner = inner.clone();
        async move { Ok(inner.oneshot(request).await.unwrap_or_else(|error| render(&*error))) }
    })
}

async fn status(service: &Boxed) -> u16 {
    service.clone().oneshot(request(1)).await.unwrap().status().as_u16()
}

#[tokio::test(start_paused = true)]
async fn an_open_breaker_further_in_opens_none_further_out() {
    for render in [error_reply::<String> as Render, grpc_error_reply::<String>] {
        let down = Arc::new(AtomicBool::new(true));
        let script = Script::new({
            let down = down.clone();
            move |_, _| answer(if down.load(SeqCst) { 500 } else { 200 }).after(ms(10))
        });
        let (there, here) =
            (Fleet::local().seed(1).provider("api"), Fleet::local().seed(2).provider("gateway"));
        let (inner, inner_breaker) = gates(&there, script.clone());
        while inner_breaker.state() == BreakerState::Closed {
            drop(inner.clone().oneshot(request(1)).await);
        }
        let (outer, outer_breaker) = gates(&here, server(inner, render));
        let ceiling = here.ceiling();
        for _ in 0..200 {
            let reply = outer.clone().oneshot(request(1)).await.expect("not refused out here");
            assert_eq!(reply.headers()["tower-herd-refused"], "open");
        }
        assert_eq!(outer_breaker.state(), BreakerState::Closed);
        assert_eq!((here.paused_until(), here.ceiling(), here.throttled()), (None, ceiling, 0));
        // The calls from out here are those that probe in there: both are back soon.
        down.store(false, SeqCst);
        let back = Instant::now();
        while status(&outer).await != 200 || inner_breaker.state() != BreakerState::Closed {
            sleep(ms(100)).await;
            assert!(back.elapsed() < secs(31));
        }
    }
}

/// The end of a task in there is no verdict out here either.
#[tokio::test(start_paused = true)]
async fn nor_does_the_end_of_a_task() {
    let replies = service_fn(|_: Request| async {
        Ok::<_, BoxError>(Refusal::new(RefusalKind::Budget, "used up", "api".into(), None).to_response())
    });
    let here = Fleet::local().seed(2).provider("gateway");
    let (outer, breaker) = gates(&here, replies);
    for _ in 0..50 {
        assert_eq!(status(&outer).await, 503);
    }
    assert_eq!((breaker.state(), here.paused_until()), (BreakerState::Closed, None));
}

/// A server's own 503 stays what it was.
#[tokio::test(start_paused = true)]
async fn without_the_mark_it_is_a_failure() {
    let here = Fleet::local().seed(2).provider("gateway");
    let (outer, breaker) = gates(&here, Script::always(answer(503)));
    for _ in 0..50 {
        drop(outer.clone().oneshot(request(1)).await);
    }
    assert_eq!(breaker.state(), BreakerState::Open);
}

#[tokio::test(start_paused = true)]
async fn it_is_sent_again_when_it_said() {
    let start = Instant::now();
    let replies = service_fn(move |_: Request| async move {
        if start.elapsed() >= secs(20) {
            return Ok::<_, BoxError>(Response::default());
        }
        let at = Some(start + secs(20));
        Ok(Refusal::new(RefusalKind::NoSlot, "its queue is full", "api".into(), at).to_response())
    });
    let here = Fleet::local().seed(2).provider("gateway");
    let (outer, _) = gates(&here, replies);
    let retry = ServiceBuilder::new().layer(JitteredRetryLayer::new()).service(outer);
    let reply = retry.oneshot(request(1)).await.unwrap();
    assert_eq!(reply.status(), 200);
    assert!(start.elapsed() >= secs(20) && start.elapsed() <= secs(31), "{:?}", start.elapsed());
    assert_eq!(here.paused_until(), None);
}

#[tokio::test(start_paused = true)]
async fn what_the_mark_says() {
    let read = |reply: &Response| HttpClassify.classify(Ok(reply));
    let refusal = |kind: RefusalKind, after: Option<Duration>| {
        Refusal::new(kind, "", "api".into(), after.map(|after| Instant::now() + after))
    };
    let open = refusal(RefusalKind::Open, Some(secs(7)));
    for reply in [open.to_response::<String>(), open.to_grpc_response()] {
        let signal = read(&reply);
        assert_eq!(
            (signal.kind, signal.origin, signal.executed),
            (Kind::Throttled, Origin::Local, Executed::No)
        );
        assert_eq!(signal.pushback, Pushback::After(secs(7)));
    }
    // The end of the task in there: perhaps after a call, and not to be sent again.
    let spent = refusal(RefusalKind::Exhausted, None);
    for reply in [spent.to_response::<String>(), spent.to_grpc_response()] {
        let signal = read(&reply);
        assert_eq!((signal.kind, signal.origin), (Kind::Failed, Origin::Local));
        assert_eq!((signal.resend, signal.executed), (ResendAdvice::Never, Executed::Maybe));
    }
    // The provider's own rate is everybody's matter.
    let paused = refusal(RefusalKind::Paused, Some(secs(7))).to_response::<String>();
    assert_eq!((read(&paused).kind, read(&paused).origin), (Kind::Throttled, Origin::Provider));
    // On any other status it says nothing.
    let mut odd = open.to_response::<String>();
    *odd.status_mut() = http::StatusCode::INTERNAL_SERVER_ERROR;
    assert_eq!(read(&odd).kind, Kind::Failed);
}
