//! Scripted providers as users see them: a tower service under a paused clock.

use std::error::Error;
use std::io;
use std::time::Duration;

use http::{Request, StatusCode};
use http_body_util::BodyExt;
use tokio::time::{Instant, timeout};
use tower::ServiceExt;
use tower_herd_sim::provider::{
    Caller, Fault, HintForm, LimitHeaders, Quota, Rate, Script, ScriptedProvider,
};

fn ask(task: u64) -> Request<()> {
    Request::post("http://p/").header("x-task-id", task).body(()).unwrap()
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

#[tokio::test(start_paused = true)]
async fn a_streamed_body_keeps_its_place_until_its_end() {
    let script = Script::new(Quota::concurrency(1)).latency(ms(100)).spread(0.0).stream_body(ms(400), 4);
    let p = ScriptedProvider::new(script);
    let start = Instant::now();
    let first = p.service().oneshot(ask(1)).await.unwrap();
    assert_eq!(start.elapsed(), ms(100));
    assert_eq!(p.service().oneshot(ask(2)).await.unwrap().status(), 429);
    let body = first.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(&body[..], b"{\"object\":\"completion\"}");
    assert!(start.elapsed() >= ms(500) && start.elapsed() < ms(510), "{:?}", start.elapsed());
    assert_eq!(p.service().oneshot(ask(2)).await.unwrap().status(), 200);
}

#[tokio::test(start_paused = true)]
async fn a_body_dropped_half_way_frees_the_place_only_if_the_provider_aborts() {
    for aborts in [false, true] {
        let script = Script::new(Quota::concurrency(1)).spread(0.0).stream_body(ms(1000), 4).aborts(aborts);
        let p = ScriptedProvider::new(script);
        let mut body = p.service().oneshot(ask(1)).await.unwrap().into_body();
        body.frame().await.unwrap().unwrap();
        drop(body);
        assert_eq!(p.in_flight(), usize::from(!aborts));
        tokio::time::sleep(ms(1000)).await;
        let s = p.stats();
        assert_eq!((s.served, s.aborted), if aborts { (0, 1) } else { (1, 0) });
    }
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_hangs_up_and_comes_again_runs_its_task_twice() {
    let p = ScriptedProvider::new(Script::new(Quota::unlimited()));
    assert!(timeout(ms(100), p.service().oneshot(ask(1))).await.is_err());
    p.service().oneshot(ask(1)).await.unwrap();
    tokio::time::sleep(ms(2000)).await;
    assert_eq!(p.stats().duplicates, 1);
}

#[tokio::test(start_paused = true)]
async fn an_outage_refuses_connections_or_answers_503() {
    let script = Script::new(Quota::unlimited())
        .fault(Fault::Connect { from: ms(0), to: ms(100) })
        .fault(Fault::Unavailable { from: ms(100), to: ms(200) });
    let p = ScriptedProvider::new(script);
    let error = p.service().oneshot(ask(1)).await.unwrap_err();
    let io = error.source().and_then(|e| e.downcast_ref::<io::Error>()).unwrap();
    assert_eq!(io.kind(), io::ErrorKind::ConnectionRefused);
    tokio::time::sleep(ms(120)).await;
    assert_eq!(p.service().oneshot(ask(1)).await.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
    tokio::time::sleep(ms(100)).await;
    assert_eq!(p.service().oneshot(ask(1)).await.unwrap().status(), 200);
    assert_eq!((p.stats().unreachable, p.stats().failed), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_brownout_fails_about_its_share() {
    let fault = Fault::Brownout { from: ms(0), to: Duration::MAX, probability: 0.2 };
    let p = ScriptedProvider::new(Script::new(Quota::unlimited()).fault(fault).seed(5));
    let calls = (0..1000).map(|t| p.service().oneshot(ask(t)));
    futures_util::future::join_all(calls).await;
    let failed = p.stats().failed;
    assert!((150..250).contains(&failed), "{failed}");
}

#[tokio::test(start_paused = true)]
async fn tokens_are_charged_by_header_extension_or_closure() {
    let quota = Quota::tokens(Rate::per_second(100.0));
    let status = |p: &ScriptedProvider, r: Request<()>| {
        let call = p.service().oneshot(r);
        async move { call.await.unwrap().status().as_u16() }
    };
    let p = ScriptedProvider::new(Script::new(quota));
    let by_header = |cost: u32| Request::get("http://p/").header("x-cost", cost).body(()).unwrap();
    assert_eq!(status(&p, by_header(80)).await, 200);
    let mut by_extension = ask(2);
    by_extension.extensions_mut().insert(Caller { cost: Some(100.0), ..Caller::default() });
    let (one, two) = tokio::join!(status(&p, by_extension), status(&p, by_header(30)));
    assert_eq!((one, two), (200, 429));
    let p = ScriptedProvider::new(Script::new(quota).cost_by(|parts| parts.uri.path().len() as f64 * 50.0));
    let long = || Request::get("http://p/x").body(()).unwrap();
    let (one, two) = tokio::join!(status(&p, long()), status(&p, long()));
    assert_eq!((one, two), (200, 429));
}

#[tokio::test(start_paused = true)]
async fn refusals_carry_the_dialect() {
    let script = Script::new(Quota::requests(Rate::per_second(0.5)))
        .hint_seconds(2.0)
        .hint_form(HintForm::Millis)
        .limit_headers(LimitHeaders::OpenAi);
    let p = ScriptedProvider::new(script);
    let (first, second) = tokio::join!(p.service().oneshot(ask(1)), p.service().oneshot(ask(2)));
    assert_eq!(first.unwrap().headers()["x-ratelimit-limit-requests"], "1");
    let second = second.unwrap();
    assert_eq!(second.status(), 429);
    assert_eq!(second.headers()["retry-after-ms"], "2000");
    assert_eq!(second.headers()["x-ratelimit-remaining-requests"], "0");
    assert_eq!(second.headers()["x-ratelimit-reset-requests"], "1.995s");
}

#[tokio::test]
async fn in_real_time_too() {
    let p = ScriptedProvider::new(Script::new(Quota::concurrency(1)).latency(ms(20)).refusal_latency(ms(1)));
    let (a, b) = tokio::join!(p.service().oneshot(ask(1)), p.service().oneshot(ask(2)));
    assert_eq!((a.unwrap().status().as_u16(), b.unwrap().status().as_u16()), (200, 429));
    assert_eq!(p.stats().peak_100ms, 2);
}
