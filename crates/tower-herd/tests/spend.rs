//! The spend cap, as callers see it.

mod common;

use bytes::Bytes;
use common::{Request, Response, Script, answer, ms, request, secs};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use proptest::prelude::*;
use std::{
    convert::Infallible,
    error::Error,
    future::Future,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};
use tower::{Layer, ServiceBuilder, ServiceExt, service_fn};
use tower_herd::{
    AttemptTimeoutLayer, BoxError, ClassifyLayer, Executed, Fleet, FleetLimitLayer, Kind, Mode, NotExecuted,
    Provider, ProviderSettings, Refusal, RefusalKind, RetryAfterLayer, Signal, SpendLayer, Switch, Task,
    TokenLimitLayer, classify_fn,
    observe::{Event, Observe},
    spend::{Allowance, Amount, Prices},
    usage::{OfBody, llm, of_reply},
};

const USED: &str = r#"{"id":"x","usage":{"prompt_tokens":100,"completion_tokens":20}}"#;

/// A unit for each token in, two for each out: `USED` is 140.
fn prices() -> OfBody<Prices> {
    llm(Prices::new(Amount::units(1_000_000), Amount::units(2_000_000)))
}

/// What each call is taken to cost.
const ESTIMATE: u64 = 200;

fn estimate(_: &Request) -> Amount {
    Amount::units(ESTIMATE)
}

fn provider() -> Provider {
    Fleet::local().configure("p", ProviderSettings::new().ceiling(1)).unwrap()
}

fn of(task: &Task) -> Request {
    let mut request = request(0);
    request.extensions_mut().insert(task.clone());
    request
}

fn task() -> Task {
    Task::new(1).deadline_in(secs(600)).spend(Amount::units(1000))
}

fn spent(task: &Task) -> u64 {
    let spent = task.spend_allowance().unwrap().spent().as_micros();
    assert_eq!(spent % 1_000_000, 0);
    spent / 1_000_000
}

type Outcome = Result<Response, BoxError>;

/// What a call costs that ends so, its body read to its end.
async fn cost_of(outcome: impl Fn() -> Outcome + Clone + Send + 'static) -> u64 {
    let service = SpendLayer::new(&provider(), estimate, prices()).layer(service_fn(move |_: Request| {
        let outcome = outcome();
        async { outcome }
    }));
    let task = task();
    if let Ok(reply) = service.oneshot(of(&task)).await {
        reply.into_body().collect().await.unwrap();
    }
    spent(&task)
}

fn reply(status: u16, headers: &[(&str, &str)], body: &str) -> Outcome {
    let mut reply = http::Response::builder().status(status);
    for (name, value) in headers {
        reply = reply.header(*name, *value);
    }
    Ok(reply.body(body.to_owned()).unwrap())
}

#[tokio::test(start_paused = true)]
async fn what_each_end_of_a_call_costs() {
    let json = ("content-type", "application/json; charset=utf-8");
    let events = ("content-type", "text/event-stream");
    let stream = format!("data: {USED}\n\ndata: [DONE]\n\n");
    let stream: &'static str = stream.leak();
    for (status, headers, body, cost) in [
        (200, vec![], USED, 140),
        (200, vec![json], USED, 140),
        (200, vec![("content-encoding", "identity")], USED, 140),
        (200, vec![events], stream, 140),
        // Not told, or not to be read.
        (200, vec![], "{}", ESTIMATE),
        (200, vec![], "", ESTIMATE),
        (200, vec![json, ("content-encoding", "gzip")], USED, ESTIMATE),
        (200, vec![("content-type", "text/html")], USED, ESTIMATE),
        // Not executed.
        (429, vec![], "{}", 0),
        (429, vec![], USED, 0),
        (401, vec![], "", 0),
        (402, vec![], "", 0),
        // Nobody knows; unless it tells.
        (500, vec![], "", ESTIMATE),
        (500, vec![], USED, 140),
        (503, vec![("retry-after", "1")], "", ESTIMATE),
        (400, vec![], "{}", ESTIMATE),
    ] {
        let name = format!("{status} {headers:?} {body}");
        let cost_of = cost_of(move || reply(status, &headers, body)).await;
        assert_eq!(cost_of, cost, "{name}");
    }
    let refusal = || Refusal::new(RefusalKind::NoSlot, "", "p".into(), None);
    assert_eq!(cost_of(move || Err(refusal().into())).await, 0);
    assert_eq!(cost_of(|| Err(NotExecuted::new("dns").into())).await, 0);
    assert_eq!(cost_of(|| Err(io::Error::from(io::ErrorKind::ConnectionRefused).into())).await, 0);
    assert_eq!(cost_of(|| Err(io::Error::from(io::ErrorKind::ConnectionReset).into())).await, ESTIMATE);
    assert_eq!(cost_of(|| Err("whatever".into())).await, ESTIMATE);
}

fn chunks(
    pieces: Vec<Bytes>,
) -> http::Response<impl http_body::Body<Data = Bytes, Error = Infallible> + Unpin> {
    let frames = pieces.into_iter().map(|piece| Ok(Frame::data(piece)));
    let body = StreamBody::new(futures_util::stream::iter(frames));
    http::Response::builder().header("content-type", "text/event-stream").body(body).unwrap()
}

/// What a call costs whose caller takes so many pieces and drops the rest.
async fn cost_after(pieces: &[&'static str], taken: usize) -> u64 {
    let pieces: Vec<_> = pieces.iter().map(|piece| Bytes::from_static(piece.as_bytes())).collect();
    let inner = service_fn(move |_: Request| {
        let reply = chunks(pieces.clone());
        async { Ok::<_, Infallible>(reply) }
    });
    let service = SpendLayer::new(&provider(), estimate, prices()).layer(inner);
    let task = task();
    let mut body = service.oneshot(of(&task)).await.unwrap().into_body();
    for _ in 0..taken {
        body.frame().await.unwrap().unwrap();
    }
    drop(body);
    spent(&task)
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_its_caller_drops() {
    let claude = [
        "data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":90,\"output_tokens\":1}}}\n\n",
        "data: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":10}}\n\n",
        "data: {\"type\":\"message_stop\"}\n\n",
        ": that was all\n\n",
    ];
    for (taken, cost) in [(0, 200), (1, 200), (2, 200), (3, 110), (4, 110)] {
        assert_eq!(cost_after(&claude, taken).await, cost, "{taken}");
    }
    // It tells on its way that it costs more than was reserved.
    let gemini = [
        "data: {\"usageMetadata\":{\"promptTokenCount\":190,\"candidatesTokenCount\":4}}\n\n",
        "data: {\"usageMetadata\":{\"promptTokenCount\":190,\"candidatesTokenCount\":50}}\n\n",
        "data: {\"usageMetadata\":{\"promptTokenCount\":190,\"candidatesTokenCount\":60}}\n\n",
    ];
    for (taken, cost) in [(0, 200), (1, 200), (2, 290), (3, 310)] {
        assert_eq!(cost_after(&gemini, taken).await, cost, "{taken}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_costs_more_is_charged_whole_and_refuses_the_next() {
    let script = Script::always(answer(200).body(r#"{"usage":{"input_tokens":1500,"output_tokens":0}}"#));
    let service = SpendLayer::new(&provider(), estimate, prices()).layer(script.clone());
    let task = task();
    service.clone().oneshot(of(&task)).await.unwrap().into_body().collect().await.unwrap();
    assert_eq!(spent(&task), 1500, "more than it had");
    assert!(service.clone().oneshot(of(&task)).await.is_err());
    task.spend_allowance().unwrap().top_up(Amount::units(699));
    assert!(service.clone().oneshot(of(&task)).await.is_err());
    task.spend_allowance().unwrap().top_up(Amount::units(1));
    assert!(service.oneshot(of(&task)).await.is_ok());
    assert_eq!(script.calls(), 2);
}

// The day's allowance of a user, which all tasks of that user draw on.
#[tokio::test(start_paused = true)]
async fn tasks_may_share_what_they_spend_from() {
    let script = Script::always(answer(500));
    let service = SpendLayer::new(&provider(), estimate, prices()).layer(script.clone());
    let day = Allowance::new(Amount::units(500));
    let tasks = [1, 2].map(|id| Task::new(id).deadline_in(secs(600)).spend_from(&day));
    let through = async |task: &Task| service.clone().oneshot(of(task)).await.is_ok();
    assert!(through(&tasks[0]).await && through(&tasks[1]).await);
    assert_eq!((day.spent(), day.left()), (Amount::units(400), Amount::units(100)));
    assert!(!through(&tasks[0]).await && !through(&tasks[1]).await, "200 each, and 100 are left");
    // One of its own is no part of it.
    assert!(through(&task()).await);
    // What is reserved by hand counts, until it is given back or settled.
    let held = day.reserve(Amount::units(100)).unwrap();
    assert_eq!((held.amount(), day.left()), (Amount::units(100), Amount::ZERO));
    held.refund();
    day.reserve(Amount::units(100)).unwrap().settle(Amount::units(30));
    assert_eq!((day.left(), script.calls()), (Amount::units(70), 3));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_estimated_or_counted_where_nothing_is_limited() {
    let script = Script::always(answer(200).body(USED));
    let layer = SpendLayer::new(&provider(), |_: &Request| panic!("not asked"), prices());
    let service = layer.clone().layer(script.clone());
    service.oneshot(request(1)).await.unwrap();
    // Its limit for a task says nothing of a call that has none.
    let mut request = request(1);
    request.extensions_mut().clear();
    layer.per_task(Amount::ZERO).layer(script).oneshot(request).await.unwrap();
}

#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<String>>>);
impl Observe for Heard {
    fn observe(&self, event: &Event<'_>) {
        self.0.lock().unwrap().push(match event {
            Event::Refused { provider, scope, kind, .. } => format!("refused {provider} {scope:?} {kind:?}"),
            Event::WouldRefuse { provider, scope, kind, .. } => {
                format!("would {provider} {scope:?} {kind:?}")
            }
            other => format!("{other:?}"),
        });
    }
}

#[tokio::test(start_paused = true)]
async fn it_enforces_observes_or_stands_aside() {
    let heard = Heard::default();
    let provider = Fleet::local().observer(heard.clone()).provider("p").scope("model");
    let switch = Switch::default();
    let layer = SpendLayer::new(&provider, estimate, prices()).switch(&switch);
    assert_eq!(layer.handle().mode(), Mode::Enforce);
    let script = Script::always(answer(200));
    let service = layer.layer(script.clone());
    let task = task();
    let go = async || service.clone().oneshot(of(&task)).await.is_ok();
    switch.set(Mode::Off);
    assert!(go().await);
    assert_eq!(spent(&task), 0, "nothing is counted");
    switch.set(Mode::Observe);
    for _ in 0..7 {
        assert!(go().await);
    }
    assert_eq!((spent(&task), switch.would_refuse()), (1000, 2), "counted as when it enforces");
    switch.set(Mode::Enforce);
    assert!(!go().await);
    assert_eq!((script.calls(), switch.would_refuse()), (8, 2));
    let heard = heard.0.lock().unwrap().clone();
    let would = "would p Some(\"model\") Spend";
    assert_eq!(heard, [would, would, "refused p Some(\"model\") Spend"]);
}

#[tokio::test(start_paused = true)]
async fn the_classifier_says_what_was_not_executed() {
    let refund = classify_fn(|_: Result<&Response, &(dyn Error + 'static)>| {
        Signal::new(Kind::Failed).with_executed(Executed::No)
    });
    let layer = SpendLayer::new(&provider(), estimate, prices());
    let script = Script::always(answer(500));
    let task = task();
    layer.clone().layer(script.clone()).oneshot(of(&task)).await.unwrap();
    assert_eq!(spent(&task), ESTIMATE);
    layer.classify(refund).layer(script).oneshot(of(&task)).await.unwrap();
    assert_eq!(spent(&task), ESTIMATE, "the second cost nothing");
}

#[tokio::test(start_paused = true)]
async fn a_meter_of_the_reply_alone() {
    let script = Script::new(|nth, _| if nth == 0 { answer(200).header("x-cost", 30) } else { answer(200) });
    let used = of_reply(|reply: &Response| {
        let units = reply.headers().get("x-cost")?.to_str().ok()?.parse().ok()?;
        Some(Amount::units(units))
    });
    let service = SpendLayer::new(&provider(), estimate, used).layer(script);
    let task = task();
    // It passes as it is: a reply of the type that it had.
    let _: Response = service.clone().oneshot(of(&task)).await.unwrap();
    assert_eq!(spent(&task), 30);
    let _: Response = service.oneshot(of(&task)).await.unwrap();
    assert_eq!(spent(&task), 30 + ESTIMATE);
}

// ------------------------------------------------------------------------------- who gives up, and when

/// The layers of a rung, with or without their sensor, over what takes a second.
fn rung(
    provider: &Provider,
    script: &Script,
) -> impl tower::Service<Request, Response: Send, Error = BoxError, Future: Send> + Clone + use<> {
    ServiceBuilder::new()
        .layer(SpendLayer::new(provider, estimate, prices()))
        .layer(RetryAfterLayer::new(provider))
        .layer(TokenLimitLayer::new(provider).estimate(|_: &Request| 10_u64))
        .layer(FleetLimitLayer::new(provider))
        .layer(ClassifyLayer::new(provider))
        .layer(AttemptTimeoutLayer::new(secs(30)))
        .service(script.clone())
}

#[tokio::test(start_paused = true)]
async fn who_gives_up_in_a_queue_of_ours_pays_nothing() {
    for queue in ["slot", "pause", "tokens"] {
        let settings =
            ProviderSettings::new().ceiling(1).tokens_per_minute(if queue == "tokens" { 10 } else { 60_000 });
        let provider = Fleet::local().configure("p", settings).unwrap();
        let script = Script::always(answer(200).after(secs(10)));
        let service = rung(&provider, &script);
        let (first, second) = (task(), task());
        let busy = tokio::spawn(service.clone().oneshot(of(&first)));
        tokio::time::sleep(ms(10)).await;
        if queue == "pause" {
            provider.pause_for(secs(5));
        }
        let waiting = service.clone().oneshot(of(&second));
        assert!(tokio::time::timeout(secs(1), waiting).await.is_err());
        assert_eq!((spent(&second), script.calls()), (0, 1), "{queue}: not sent");
        // One that waits as well, and is then sent, pays when it is dropped.
        let waiting = service.clone().oneshot(of(&second));
        let past = if queue == "tokens" { secs(62) } else { secs(15) };
        assert!(tokio::time::timeout(past, waiting).await.is_err());
        assert_eq!((spent(&second), script.calls()), (ESTIMATE, 2), "{queue}: sent");
        drop(busy.await.unwrap());
    }
}

/// Polls of a call that waits in turn for a slot and for its reply; dropped after each of them.
#[tokio::test(start_paused = true)]
async fn dropped_at_every_poll_it_pays_if_and_only_if_it_was_sent() {
    let mut sent = [0, 0];
    for polls in 0..60 {
        let provider = provider();
        let script = Script::always(answer(200).after(ms(500)));
        let service = rung(&provider, &script);
        let busy = tokio::spawn(service.clone().oneshot(of(&task())));
        tokio::time::sleep(ms(10)).await;
        let task = task();
        let mut call = Box::pin(service.clone().oneshot(of(&task)));
        let mut is_over = false;
        for _ in 0..polls {
            if is_over {
                break;
            }
            is_over = call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
            tokio::time::sleep(ms(30)).await;
        }
        drop(call);
        let was_sent = script.calls() == 2;
        assert_eq!(spent(&task), if was_sent { ESTIMATE } else { 0 }, "after {polls} polls");
        sent[usize::from(was_sent)] += 1;
        drop(busy.await.unwrap());
        // Nothing is held by anybody.
        tokio::time::sleep(secs(20)).await;
        assert_eq!((provider.in_flight(), provider.waiting(), provider.waiting_for_tokens()), (0, 0, 0));
    }
    assert!(sent.iter().all(|n| *n > 5), "{sent:?}");
}

/// Where nobody can see whether it was sent, it counts as sent.
#[tokio::test(start_paused = true)]
async fn a_call_that_is_deferred_counts_as_sent() {
    let provider = provider();
    let script = Script::always(answer(200).after(secs(10)));
    let limited = FleetLimitLayer::new(&provider).until_reply().layer(script.clone());
    let elsewhere = service_fn(move |request: Request| {
        let call = tokio::spawn(limited.clone().oneshot(request));
        async { call.await.unwrap() }
    });
    let service = SpendLayer::new(&provider, estimate, prices()).layer(elsewhere);
    let first = tokio::spawn(service.clone().oneshot(of(&task())));
    tokio::time::sleep(ms(10)).await;
    let task = task();
    assert!(tokio::time::timeout(secs(1), service.oneshot(of(&task))).await.is_err());
    assert_eq!(spent(&task), ESTIMATE);
    drop(first.await.unwrap());
}

// ------------------------------------------------------------------------------------ bodies pass unchanged

/// Data in two parts, as some clients have it.
type Rope = bytes::buf::Chain<Bytes, Bytes>;

#[tokio::test(start_paused = true)]
async fn data_in_several_parts_is_read_whole() {
    let (head, tail) = USED.split_at(30);
    let body = move || {
        let data: Rope = bytes::Buf::chain(Bytes::from(head), Bytes::from(tail));
        StreamBody::new(futures_util::stream::iter([Ok::<_, Infallible>(Frame::data(data))]))
    };
    let inner = service_fn(move |_: Request| async move { Ok::<_, Infallible>(http::Response::new(body())) });
    let service = SpendLayer::new(&provider(), estimate, prices()).layer(inner);
    let task = task();
    service.oneshot(of(&task)).await.unwrap().into_body().collect().await.unwrap();
    assert_eq!(spent(&task), 140);
}

#[tokio::test(start_paused = true)]
async fn trailers_sizes_and_ends_pass() {
    use http_body::Body as _;
    let body = http_body_util::Full::new(Bytes::from(USED)).with_trailers(async {
        Some(Ok(http::HeaderMap::from_iter([(http::header::ETAG, "x".parse().unwrap())])))
    });
    let body = Mutex::new(Some(Box::pin(body)));
    let inner = service_fn(|_: Request| {
        let body = body.lock().unwrap().take().unwrap();
        async { Ok::<_, Infallible>(http::Response::new(body)) }
    });
    let service = SpendLayer::new(&provider(), estimate, prices()).layer(inner);
    let task = task();
    let mut body = service.oneshot(of(&task)).await.unwrap().into_body();
    assert_eq!((body.is_end_stream(), body.size_hint().lower()), (false, body.get_ref().size_hint().lower()));
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), USED);
    assert_eq!(spent(&task), 140, "told: the call is settled though its trailers are to come");
    assert!(body.frame().await.unwrap().unwrap().is_trailers());
    assert!(body.frame().await.is_none());
    let script = Script::always(answer(200));
    let reply =
        SpendLayer::new(&provider(), estimate, prices()).layer(script).oneshot(of(&task)).await.unwrap();
    assert!(reply.body().is_end_stream());
}

fn now<F: Future>(future: F) -> F::Output {
    match std::pin::pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("nothing here waits"),
    }
}

proptest! {
    /// Any bytes, cut anywhere, metered by two layers: they come out as they went in, piece by piece; both
    /// layers charge the same; and the cuts make no difference.
    #[test]
    fn any_bytes_in_any_pieces(
        noise in prop::collection::vec(any::<u8>(), 0..300),
        is_told: bool,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let told = format!("\n\ndata: {USED}\n\ndata: [DONE]\n\n");
        let bytes: Vec<u8> = noise.iter().copied().chain(if is_told { told.bytes() } else { "".bytes() }).collect();
        let mut places: Vec<_> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        places.extend([0, bytes.len()]);
        places.sort_unstable();
        let pieces: Vec<_> = places.windows(2).map(|pair| Bytes::copy_from_slice(&bytes[pair[0]..pair[1]])).collect();
        let (outer, inner, limit) = (Allowance::new(Amount::units(1000)), Allowance::new(Amount::units(1000)), pieces.clone());
        let layer = || SpendLayer::new(&provider(), estimate, prices());
        let service = layer().within(&outer).layer(layer().within(&inner).layer(service_fn(move |_: Request| {
            std::future::ready(Ok::<_, Infallible>(chunks(limit.clone())))
        })));
        let mut body = now(service.oneshot(request(1))).unwrap().into_body();
        for piece in pieces {
            prop_assert_eq!(now(body.frame()).unwrap().unwrap().into_data().unwrap(), piece);
        }
        prop_assert!(now(body.frame()).is_none());
        let cost = if is_told { 140 } else { ESTIMATE };
        prop_assert_eq!(inner.spent(), Amount::units(cost));
        prop_assert_eq!(outer.spent(), Amount::units(cost));
    }
}

/// The inner layer reads; the outer is told, at the same instant, in a stream too.
#[tokio::test(start_paused = true)]
async fn one_reader_serves_both_layers() {
    let weighed = Arc::new(AtomicUsize::new(0));
    let settings = ProviderSettings::new().tokens_per_minute(1000);
    let provider = Fleet::local().configure("p", settings).unwrap();
    let pieces =
        ["data: {\"usage\":{\"prompt_tokens\":700,", "\"completion_tokens\":100}}\n\n", "data: [DONE]\n\n"];
    let inner = service_fn(move |_: Request| async move {
        let pieces = pieces.map(|piece| Bytes::from_static(piece.as_bytes()));
        Ok::<_, Infallible>(chunks(pieces.to_vec()))
    });
    let counted = weighed.clone();
    let count = llm(move |usage: &tower_herd::usage::Usage| {
        counted.fetch_add(1, Ordering::SeqCst);
        usage.total()
    });
    let service = ServiceBuilder::new()
        .layer(SpendLayer::new(&provider, estimate, prices()))
        // The outer one could not read it any more.
        .map_response(|mut reply: http::Response<_>| {
            reply.headers_mut().insert("content-type", http::HeaderValue::from_static("text/plain"));
            reply
        })
        .layer(TokenLimitLayer::with(&provider, |_: &Request| 100_u64, count).patience(Duration::ZERO))
        .service(inner);
    let task = task();
    let mut body = service.clone().oneshot(of(&task)).await.unwrap().into_body();
    for _ in 0..3 {
        body.frame().await.unwrap().unwrap();
    }
    assert_eq!(spent(&task), 900);
    assert_eq!(weighed.load(Ordering::SeqCst), 1);
    // 800 of the 1000 tokens are gone: two such calls more, and not three.
    for ok in [true, true, false] {
        assert_eq!(service.clone().oneshot(of(&Task::new(2))).await.is_ok(), ok);
    }
}
