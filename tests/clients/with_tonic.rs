//! tonic's `Channel`, with a hand-written codec.

use crate::{
    gaps, gates,
    grpc::{Server, Text, fails, pushing_back, retry_info, says},
    ms, provider, refusing, secs, settled,
};
use futures_util::{StreamExt, stream};
use http::uri::PathAndQuery;
use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, Request, Status, body::Body, client::GrpcService, transport::Channel};
use tower::{ServiceBuilder, util::BoxCloneSyncService};
use tower_herd::{
    Fleet, HashedFailover, JitteredRetryLayer, Provider, Refusal, RefusalKind, Replay, RetryAfterLayer,
    Safety, Task, TaskLayer, failover::Rung, replay, retry::ReplayBody,
};

const CAP: usize = 64 << 10;

fn path() -> PathAndQuery {
    PathAndQuery::from_static("/test.Test/Say")
}

type Wrap = fn(ReplayBody<Body>) -> Body;

fn kept(cap: usize) -> Replay<Wrap> {
    replay(cap, Body::new::<ReplayBody<Body>> as Wrap)
}

/// What a stack looks like from outside: one that tonic's generated clients take.
macro_rules! stack {
    ($provider:expr, $channel:expr) => {
        stack!($provider, $channel, CAP)
    };
    ($provider:expr, $channel:expr, $cap:expr) => {
        ServiceBuilder::new()
            .layer(TaskLayer::new())
            .layer(JitteredRetryLayer::new().base(ms(20)).resend(kept($cap)))
            .layer(gates!($provider))
            .service($channel)
    };
}

/// A request that may be repeated.
fn costly<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.extensions_mut().insert(Safety::Costly);
    request
}

async fn unary<T>(service: T, request: Request<String>) -> Result<String, Status>
where
    T: GrpcService<Body>,
    T::ResponseBody: Send + 'static,
    <T::ResponseBody as http_body::Body>::Error: Into<tower_herd::BoxError>,
{
    let mut client = tonic::client::Grpc::new(service);
    client.ready().await.map_err(|error| Status::from_error(error.into()))?;
    client.unary(request, path(), Text).await.map(tonic::Response::into_inner)
}

/// All messages of a stream, and how it ended.
async fn listen<T>(service: T, request: Request<String>) -> Result<(Vec<String>, Result<(), Status>), Status>
where
    T: GrpcService<Body>,
    T::ResponseBody: Send + 'static,
    <T::ResponseBody as http_body::Body>::Error: Into<tower_herd::BoxError>,
{
    let mut client = tonic::client::Grpc::new(service);
    client.ready().await.map_err(|error| Status::from_error(error.into()))?;
    let mut replies = client.server_streaming(request, path(), Text).await?.into_inner();
    let mut messages = Vec::new();
    loop {
        match replies.message().await {
            Ok(Some(message)) => messages.push(message),
            Ok(None) => return Ok((messages, Ok(()))),
            Err(status) => return Ok((messages, Err(status))),
        }
    }
}

async fn up<T>(service: T, messages: Vec<String>) -> Result<String, Status>
where
    T: GrpcService<Body>,
    T::ResponseBody: Send + 'static,
    <T::ResponseBody as http_body::Body>::Error: Into<tower_herd::BoxError>,
{
    let mut client = tonic::client::Grpc::new(service);
    client.ready().await.map_err(|error| Status::from_error(error.into()))?;
    // In pieces that come one by one, as from a file.
    let messages = stream::iter(messages).then(|message| async {
        sleep(ms(2)).await;
        message
    });
    client.client_streaming(costly(messages), path(), Text).await.map(tonic::Response::into_inner)
}

fn times(server: &Server) -> Vec<Instant> {
    server.calls().iter().map(|call| call.at).collect()
}

#[tokio::test]
async fn a_unary_call_is_repeated_on_unavailable_if_it_may_be() {
    for (request, calls) in [(costly("hi".to_owned()), 2), (Request::new("hi".to_owned()), 1)] {
        let server = Server::start(|n| match n {
            0 => fails(Status::unavailable("not yet")),
            _ => says(&["hello"]),
        })
        .await;
        let p = provider("p", 4);
        let outcome = unary(stack!(&p, server.channel()), request).await;
        match calls {
            2 => assert_eq!(outcome.unwrap(), "hello"),
            // An unkeyed write that may have been executed: the caller gets the status, as it came.
            _ => {
                let status = outcome.unwrap_err();
                assert_eq!((status.code(), status.message()), (Code::Unavailable, "not yet"));
            }
        }
        let seen = server.calls();
        assert!(seen.len() == calls && seen.iter().all(|call| call.messages == ["hi"]), "{seen:?}");
        settled(&p).await;
    }
}

#[tokio::test]
async fn a_pushback_is_waited_for_by_all_and_proves_that_nothing_was_executed() {
    let server = Server::start(|n| match n {
        0 => fails(pushing_back(Status::resource_exhausted("slowly"), "700")),
        _ => says(&["hello"]),
    })
    .await;
    let p = provider("p", 8);
    let service = stack!(&p, server.channel());
    // An unkeyed write, each of them.
    let first = tokio::spawn(unary(service.clone(), Request::new("0".to_owned())));
    while p.throttled() == 0 {
        sleep(ms(1)).await;
    }
    let others = (1..6).map(|n: u32| tokio::spawn(unary(service.clone(), Request::new(n.to_string()))));
    for call in others.chain([first]).collect::<Vec<_>>() {
        assert_eq!(call.await.unwrap().unwrap(), "hello");
    }
    let gaps = gaps(&times(&server));
    assert!(gaps.len() == 6 && gaps.iter().all(|gap| (ms(700)..secs(4)).contains(gap)), "{gaps:?}");
}

#[tokio::test]
async fn a_negative_pushback_means_never() {
    for code in [Code::Unavailable, Code::ResourceExhausted] {
        let server = Server::start(move |_| fails(pushing_back(Status::new(code, "go away"), "-1"))).await;
        let p = provider("p", 4);
        let status = unary(stack!(&p, server.channel()), costly("hi".to_owned())).await.unwrap_err();
        assert_eq!((status.code(), server.calls().len()), (code, 1));
    }
}

// Of an error that comes before any message, and of one that comes after: in the head, and in the trailers.
#[tokio::test]
async fn a_retry_info_among_the_details_is_waited_for() {
    let told = || retry_info(&Status::resource_exhausted("slowly"), ms(700));
    let server = Server::start(move |n| match n {
        0 => fails(told()),
        1 => says(&["one"]).then(told()),
        _ => says(&["two"]),
    })
    .await;
    let p = provider("p", 4);
    let service = stack!(&p, server.channel());
    // An unkeyed write: that it is told when to come back proves that it was not executed.
    let (messages, end) = listen(service.clone(), Request::new("hi".to_owned())).await.unwrap();
    assert_eq!((messages.as_slice(), server.calls().len()), (&["one".to_owned()][..], 2));
    assert_eq!(end.unwrap_err().details(), told().details(), "the caller can read them too");
    assert_eq!(listen(service, costly("hi".to_owned())).await.unwrap().0, ["two"]);
    let gaps = gaps(&times(&server));
    assert!((ms(700)..secs(4)).contains(&gaps[0]), "{gaps:?}");
    assert!((ms(700)..secs(4)).contains(&(gaps[1].saturating_sub(gaps[0]))), "{gaps:?}");
    settled(&p).await;
}

#[tokio::test]
async fn a_pushback_beats_the_retry_info() {
    let server = Server::start(|n| match n {
        0 => fails(pushing_back(retry_info(&Status::unavailable("not yet"), secs(30)), "100")),
        _ => says(&["hello"]),
    })
    .await;
    let p = provider("p", 4);
    assert_eq!(unary(stack!(&p, server.channel()), costly("hi".to_owned())).await.unwrap(), "hello");
    let gaps = gaps(&times(&server));
    assert!((ms(100)..secs(10)).contains(&gaps[0]), "{gaps:?}");
}

#[tokio::test]
async fn a_status_after_messages_is_not_repeated_but_learned_from() {
    let server = Server::start(|n| match n {
        0 => says(&["one", "two"]).then(pushing_back(Status::resource_exhausted("enough"), "600")),
        _ => says(&["three"]),
    })
    .await;
    let p = provider("p", 4);
    let service = stack!(&p, server.channel());
    let (messages, end) = listen(service.clone(), costly("hi".to_owned())).await.unwrap();
    assert_eq!(messages, ["one", "two"]);
    assert_eq!(end.unwrap_err().code(), Code::ResourceExhausted);
    assert_eq!((server.calls().len(), p.throttled()), (1, 1), "the caller has seen a part of it");
    assert!(p.paused_until().is_some());
    assert_eq!(listen(service, costly("hi".to_owned())).await.unwrap().0, ["three"]);
    assert!(gaps(&times(&server))[0] >= ms(600), "{:?}", gaps(&times(&server)));
    settled(&p).await;
}

#[tokio::test]
async fn a_stream_that_fails_before_its_first_message_is_repeated() {
    let server = Server::start(|n| match n {
        0 => fails(Status::unavailable("not yet")),
        _ => says(&["one", "two", "three"]).every(ms(30)),
    })
    .await;
    let p = provider("p", 1);
    let service = stack!(&p, server.channel());
    let (messages, end) = listen(service, costly("hi".to_owned())).await.unwrap();
    assert!(end.is_ok());
    assert_eq!((messages.len(), server.calls().len()), (3, 2));
    settled(&p).await;
}

#[tokio::test]
async fn a_stream_holds_its_slot_until_its_last_message() {
    let server = Server::start(|_| says(&["one", "two", "three"]).every(ms(60))).await;
    let p = provider("p", 1);
    let service = stack!(&p, server.channel());
    let first = tokio::spawn(listen(service.clone(), costly("a".to_owned())));
    while server.calls().is_empty() {
        sleep(ms(1)).await;
    }
    let second = tokio::spawn(listen(service, costly("b".to_owned())));
    sleep(ms(60)).await;
    assert_eq!((p.in_flight(), p.waiting(), server.calls().len()), (1, 1, 1));
    for call in [first, second] {
        assert_eq!(call.await.unwrap().unwrap().0.len(), 3);
    }
    assert!(gaps(&times(&server))[0] >= ms(180));
    settled(&p).await;
}

#[tokio::test]
async fn the_messages_of_a_client_stream_are_replayed_within_the_cap_and_sent_once_beyond_it() {
    let messages: Vec<String> = (0..20).map(|n| format!("message {n}")).collect();
    for (cap, calls) in [(CAP, 2), (100, 1)] {
        let server = Server::start(|n| match n {
            0 => fails(Status::unavailable("not yet")),
            _ => says(&["all of it"]),
        })
        .await;
        let p = provider("p", 4);
        let outcome = up(stack!(&p, server.channel(), cap), messages.clone()).await;
        match calls {
            2 => assert_eq!(outcome.unwrap(), "all of it"),
            _ => assert_eq!(outcome.unwrap_err().code(), Code::Unavailable),
        }
        let seen = server.calls();
        assert!(
            seen.len() == calls && seen.iter().all(|call| call.messages == messages),
            "cap {cap}: {seen:?}"
        );
    }
}

#[tokio::test]
async fn a_refusal_is_found_in_the_status() {
    let server = Server::start(|_| fails(pushing_back(Status::resource_exhausted("later"), "60000"))).await;
    let p = provider("p", 4);
    let service =
        ServiceBuilder::new().layer(RetryAfterLayer::new(&p).patience(secs(1))).service(server.channel());
    unary(service.clone(), Request::new("hi".to_owned())).await.unwrap_err();
    let start = Instant::now();
    let status = unary(service, Request::new("hi".to_owned())).await.unwrap_err();
    let refusal = Refusal::find(&status).expect("through tonic's wrapper");
    assert_eq!((refusal.kind, &*refusal.provider), (RefusalKind::Paused, "p"));
    assert!(refusal.wait().unwrap() > secs(50) && start.elapsed() < secs(5));
    assert_eq!(server.calls().len(), 1);
}

type Boxed = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, tower_herd::BoxError>;

fn rung(provider: &Provider, channel: Channel) -> Rung<Boxed, http::Request<Body>> {
    let layers = (
        tower::util::MapResponseLayer::new(|reply: http::Response<_>| reply.map(Body::new)),
        gates!(provider),
    );
    Rung::new(provider, Boxed::new(tower::Layer::layer(&layers, channel)))
}

// Its connection was refused: the one thing that proves of a channel that nothing was executed.
#[tokio::test]
async fn a_write_goes_on_to_the_next_channel_when_the_first_cannot_connect() {
    let (_socket, url) = refusing();
    let dead = tonic::transport::Endpoint::from_shared(url).unwrap().connect_lazy();
    let server = Server::start(|_| says(&["hello"])).await;
    let fleet = Fleet::local();
    let rungs = [rung(&fleet.provider("a"), dead), rung(&fleet.provider("b"), server.channel()).tier(1)];
    let ladder = HashedFailover::new(rungs).unwrap().resend(kept(CAP));
    let service = ServiceBuilder::new().layer(TaskLayer::new()).service(ladder);
    assert_eq!(unary(service, Request::new("hi".to_owned())).await.unwrap(), "hello");
    assert_eq!(server.calls().len(), 1);
}

#[tokio::test]
async fn extensions_of_a_request_of_tonic_reach_the_layers() {
    let server = Server::start(|_| fails(Status::unavailable("no"))).await;
    let p = provider("p", 4);
    let mut request = costly("hi".to_owned());
    let task = Task::new("mine").allowance(2);
    request.extensions_mut().insert(task.clone());
    unary(stack!(&p, server.channel()), request).await.unwrap_err();
    assert_eq!(server.calls().len(), 2, "its own allowance, not that of the layers");
    assert_eq!(task.spent(), 1, "the last failure is not charged: nothing follows it");
}

#[tokio::test]
async fn calls_cancelled_at_any_point_leave_nothing_behind() {
    let server = Server::start(|n| match n % 5 {
        2 => fails(Status::unavailable("no")),
        3 => fails(pushing_back(Status::resource_exhausted("slowly"), "40")),
        _ => says(&["one", "two"]).every(ms(3)),
    })
    .await;
    let p = provider("p", 3);
    let service = stack!(&p, server.channel());
    let calls: Vec<_> = (0..200u64)
        .map(|i| {
            let call = listen(service.clone(), costly(i.to_string()));
            tokio::spawn(timeout(std::time::Duration::from_micros(i * 200), call))
        })
        .collect();
    for call in calls {
        // Cut off or not: what counts is what is left.
        call.await.unwrap().ok();
    }
    settled(&p).await;
    let last = timeout(secs(10), listen(service, costly("last".to_owned()))).await.expect("nobody is stuck");
    assert!(last.is_ok());
}
