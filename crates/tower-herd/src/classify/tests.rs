use super::report::log::{Entry, take};
use super::*;
use crate::{
    BoxError, Fleet, HttpClassify, Kind, NotExecuted, Provider, Pushback, Signal, classify_body,
    classify_head,
};
use bytes::{Bytes, BytesMut};
use futures_util::{FutureExt, future};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Empty, Full};
use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt, service_fn};

fn provider() -> Provider {
    let _ = take();
    Fleet::local().provider("p")
}

pin_project_lite::pin_project! {
    /// A body that does what it is told, step by step. Not `Unpin`: it notices when it is moved.
    #[derive(Default)]
    struct Script {
        steps: VecDeque<Step>,
        waiting: Option<Pin<Box<tokio::time::Sleep>>>,
        polled_at: Option<usize>,
        #[pin]
        not_unpin: std::marker::PhantomPinned,
    }
}

#[derive(Clone, Debug)]
enum Step {
    Data(&'static str),
    Trailers(&'static [(&'static str, &'static str)]),
    Wait(Duration),
    Fail,
}
use Step::{Data, Fail, Trailers, Wait};

fn script(steps: impl IntoIterator<Item = Step>) -> Script {
    Script { steps: steps.into_iter().collect(), ..Script::default() }
}

impl Body for Script {
    type Data = Bytes;
    type Error = BoxError;
    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let here = std::ptr::from_ref(&*self).addr();
        let me = self.project();
        assert_eq!(*me.polled_at.get_or_insert(here), here, "moved after it was polled");
        loop {
            if let Some(waiting) = me.waiting {
                std::task::ready!(waiting.as_mut().poll(cx));
                *me.waiting = None;
            }
            return Poll::Ready(match me.steps.pop_front() {
                Some(Wait(time)) => {
                    *me.waiting = Some(Box::pin(tokio::time::sleep(time)));
                    continue;
                }
                Some(Data(text)) => Some(Ok(Frame::data(Bytes::from_static(text.as_bytes())))),
                Some(Trailers(pairs)) => Some(Ok(Frame::trailers(
                    pairs
                        .iter()
                        .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
                        .collect(),
                ))),
                Some(Fail) => Some(Err("reset".into())),
                None => None,
            });
        }
    }
    fn is_end_stream(&self) -> bool {
        self.steps.is_empty() && self.waiting.is_none()
    }
}

fn reply<B>(status: u16, headers: &[(&str, &str)], body: B) -> http::Response<B> {
    let mut builder = http::Response::builder().status(status);
    for (name, value) in headers {
        builder = builder.header(*name, *value);
    }
    builder.body(body).unwrap()
}

/// One call through a sensor whose inner service answers `reply`.
async fn call<C, B>(
    layer: &ClassifyLayer<C, Bodies>,
    reply: http::Response<B>,
) -> http::Response<SensedBody<B>>
where
    B: Body,
    C: Classify<http::Response<B>> + Clone,
{
    let mut reply = Some(reply);
    let inner = service_fn(move |()| future::ready(Ok::<_, Infallible>(reply.take().unwrap())));
    layer.layer(inner).oneshot(()).await.unwrap()
}

fn signal<B>(reply: &http::Response<B>) -> Signal {
    HttpClassify.classify(Ok(reply))
}

async fn text<B: Body<Data = Bytes>>(body: B) -> Result<String, B::Error> {
    let bytes = body.collect().await?.to_bytes();
    Ok(String::from_utf8(bytes.to_vec()).unwrap())
}

const OPENAI_EMPTY: &str =
    r#"{"error":{"code":"insufficient_quota","message":"You exceeded your current quota."}}"#;

#[tokio::test]
async fn a_success_passes_and_is_watched_to_its_end() {
    let layer = ClassifyLayer::new(&provider());
    let sent = call(&layer, reply(200, &[], script([Data("a"), Data("b")]))).await;
    assert!(sent.extensions().is_empty(), "a success stays a glance for the layers further out");
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Success)]);
    assert_eq!(text(sent.into_body()).await.unwrap(), "ab");
    assert_eq!(take(), [Entry::End(None)]);

    drop(call(&layer, reply(200, &[], Empty::<Bytes>::new())).await);
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Success), Entry::End(None)]);
}

#[tokio::test]
async fn late_outcomes_are_reported_once() {
    let layer = ClassifyLayer::new(&provider());
    for (steps, expected) in [
        (vec![Data("a"), Fail], Entry::End(Some(Kind::Failed))),
        (vec![Data("a"), Trailers(&[("grpc-status", "0")])], Entry::End(None)),
        (vec![Data("a"), Trailers(&[("grpc-status", "14")])], Entry::End(Some(Kind::Failed))),
        (
            vec![Trailers(&[("grpc-status", "8"), ("grpc-retry-pushback-ms", "100")])],
            Entry::End(Some(Kind::Throttled)),
        ),
        (vec![Data("a"), Trailers(&[("x-checksum", "1")])], Entry::End(None)),
    ] {
        let sent = call(&layer, reply(200, &[], script(steps.clone()))).await;
        let mut body = Box::pin(sent.into_body());
        while let Some(Ok(_)) = body.frame().await {}
        drop(body);
        assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Success), expected], "{steps:?}");
    }
}

#[tokio::test]
async fn a_body_dropped_early_is_reported_as_given_up() {
    let layer = ClassifyLayer::new(&provider());
    let sent = call(&layer, reply(200, &[], script([Data("a"), Data("b")]))).await;
    let mut body = Box::pin(sent.into_body());
    body.frame().await.unwrap().unwrap();
    drop(body);
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Success), Entry::Dropped]);
}

#[tokio::test]
async fn a_call_dropped_at_any_point_is_reported_as_given_up() {
    let layer = ClassifyLayer::new(&provider());
    let pending = || service_fn(|()| future::pending::<Result<http::Response<Full<Bytes>>, Infallible>>());
    // Never polled.
    drop(layer.layer(pending()).call(()));
    assert_eq!(take(), [Entry::Begin, Entry::Dropped]);
    // Polled and pending.
    let mut calling = Box::pin(layer.layer(pending()).call(()));
    assert!((&mut calling).now_or_never().is_none());
    drop(calling);
    assert_eq!(take(), [Entry::Begin, Entry::Dropped]);
    // Reading an error body: its head has said what it is, and a pause would be lost.
    let slow = service_fn(|()| {
        future::ready(Ok::<_, Infallible>(reply(500, &[], script([Wait(Duration::from_millis(500))]))))
    });
    let mut reading = Box::pin(layer.layer(slow).call(()));
    assert!((&mut reading).now_or_never().is_none());
    drop(reading);
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Failed)]);
    // The inner service panics.
    let panics =
        service_fn(|()| -> future::Ready<Result<http::Response<Full<Bytes>>, Infallible>> { panic!("bug") });
    let caught =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(layer.layer(panics).call(()))));
    assert!(caught.is_err());
    assert_eq!(take(), [Entry::Begin, Entry::Dropped]);
}

#[tokio::test]
async fn an_error_body_is_read_and_replayed() {
    let layer = ClassifyLayer::new(&provider());
    let (first, second) = OPENAI_EMPTY.split_at(20);
    let steps = [Data(first), Wait(Duration::from_millis(1)), Data(second), Trailers(&[("x-sum", "1")])];
    let sent = call(&layer, reply(429, &[("retry-after", "3")], script(steps))).await;
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Depleted)]);
    assert_eq!(sent.extensions().get::<Signal>().map(|signal| signal.kind), Some(Kind::Depleted));
    assert_eq!(signal(&sent).pushback, Pushback::After(Duration::from_secs(3)));
    assert!(!sent.body().is_end_stream());
    assert_eq!(sent.body().size_hint().exact(), Some(OPENAI_EMPTY.len() as u64));
    let body = sent.into_body().collect().await.unwrap();
    assert_eq!(body.trailers().unwrap()["x-sum"], "1");
    assert_eq!(body.to_bytes(), OPENAI_EMPTY);
    assert_eq!(take(), [], "an error is over at its head");
}

#[tokio::test]
async fn errors_without_a_body_are_stamped_too() {
    let layer = ClassifyLayer::new(&provider());
    let sent = call(&layer, reply(429, &[("retry-after", "3")], Empty::<Bytes>::new())).await;
    assert_eq!(sent.extensions().get::<Signal>().map(|signal| signal.kind), Some(Kind::Throttled));
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Throttled)]);
}

#[tokio::test(start_paused = true)]
async fn reading_an_error_is_bounded_in_time() {
    let start = Instant::now();
    let steps = || script([Data("{"), Wait(Duration::from_secs(5)), Data("}")]);
    let sent = call(&ClassifyLayer::new(&provider()), reply(500, &[], steps())).await;
    assert_eq!(start.elapsed(), Duration::from_secs(1));
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Failed)]);
    assert_eq!(text(sent.into_body()).await.unwrap(), "{}", "nothing is lost");

    let start = Instant::now();
    let layer = ClassifyLayer::new(&provider()).read_error(1024, Duration::from_millis(20));
    drop(call(&layer, reply(500, &[], steps())).await);
    assert_eq!(start.elapsed(), Duration::from_millis(20));
}

#[tokio::test]
async fn reading_an_error_is_bounded_in_size() {
    let steps = || script([Data("0123456789"), Data("0123456789"), Data(OPENAI_EMPTY)]);
    for (bytes, kind) in [(0, Kind::Throttled), (10, Kind::Throttled), (64 * 1024, Kind::Throttled)] {
        let layer = ClassifyLayer::new(&provider()).read_error(bytes, Duration::from_secs(1));
        let sent = call(&layer, reply(429, &[], steps())).await;
        assert_eq!(signal(&sent).kind, kind);
        assert_eq!(text(sent.into_body()).await.unwrap().len(), 20 + OPENAI_EMPTY.len());
    }
    let layer = ClassifyLayer::new(&provider()).read_error(0, Duration::from_secs(1));
    let sent = call(&layer, reply(429, &[], script([Data(OPENAI_EMPTY)]))).await;
    assert_eq!(signal(&sent).kind, Kind::Throttled, "told not to read");
}

#[tokio::test]
async fn an_error_body_that_breaks_is_handed_on_as_it_was() {
    let layer = ClassifyLayer::new(&provider());
    let sent = call(&layer, reply(503, &[], script([Data("a"), Fail]))).await;
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Failed)]);
    let mut body = Box::pin(sent.into_body());
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "a");
    assert!(body.frame().await.unwrap().is_err());
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn a_stamp_of_an_inner_stack_is_kept() {
    let layer = ClassifyLayer::new(&provider());
    let mut stamped = reply(429, &[], script([Data(OPENAI_EMPTY)]));
    let stamp = Signal::new(Kind::Throttled).with_pushback(Pushback::After(Duration::from_secs(8)));
    stamped.extensions_mut().insert(stamp);
    let sent = call(&layer, stamped).await;
    assert_eq!(signal(&sent), stamp);
    assert!(sent.body().inner_is_untouched());
}

#[tokio::test]
async fn successes_are_looked_into_only_when_told() {
    let hidden = r#"{"error":{"code":429,"message":"Rate limit exceeded"},"choices":null}"#;
    let json = [("content-type", "application/json")];
    let sent = call(&ClassifyLayer::new(&provider()), reply(200, &json, Full::<Bytes>::from(hidden))).await;
    assert_eq!(signal(&sent).kind, Kind::Success);
    let layer = ClassifyLayer::new(&provider()).read_success(1024);
    let sent = call(&layer, reply(200, &json, Full::<Bytes>::from(hidden))).await;
    assert_eq!(signal(&sent).kind, Kind::Throttled);
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Throttled)]);
    assert_eq!(text(sent.into_body()).await.unwrap(), hidden);

    // A success that was read is watched to its end if there is more of it.
    let layer = ClassifyLayer::new(&provider()).read_success(2);
    let sent = call(&layer, reply(200, &json, script([Data("{}"), Data("x"), Fail]))).await;
    assert!(sent.extensions().is_empty());
    assert!(text(sent.into_body()).await.is_err());
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Success), Entry::End(Some(Kind::Failed))]);

    // One that says that it is longer, and media, pass at once.
    for (kind, body) in [("application/json", "{\"error\":{}}"), ("image/png", "x")] {
        let sent = call(&layer, reply(200, &[("content-type", kind)], Full::<Bytes>::from(body))).await;
        assert!(sent.body().inner_is_untouched(), "{kind}");
        drop(sent);
        assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Success), Entry::Dropped]);
    }

    // A success that breaks while it is read is a failure, and is handed on as it was.
    let layer = ClassifyLayer::new(&provider()).read_success(1024);
    let sent = call(&layer, reply(200, &json, script([Data("{"), Fail]))).await;
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Failed)]);
    assert_eq!(signal(&sent).kind, Kind::Failed);
    assert!(text(sent.into_body()).await.is_err());
}

// anthropics/anthropic-sdk-python#1258
#[tokio::test]
async fn the_first_event_of_a_stream_may_be_an_error() {
    let sse = [("content-type", "text/event-stream; charset=utf-8")];
    let layer = ClassifyLayer::new(&provider()).read_success(1024);
    let overloaded = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n";
    let steps = [
        Data(": hello\n\n"),
        Wait(Duration::from_millis(1)),
        Data(overloaded),
        Wait(Duration::from_secs(60)),
    ];
    let sent = call(&layer, reply(200, &sse, script(steps))).await;
    assert_eq!(signal(&sent).kind, Kind::Overloaded);
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Overloaded)]);

    // A later one ends the call; the head has committed it.
    let steps = [Data("data: {}\n\n"), Data("data: {}\n\n"), Data(overloaded), Data("data: {}\n\n")];
    let sent = call(&layer, reply(200, &sse, script(steps))).await;
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Success)]);
    assert!(text(sent.into_body()).await.unwrap().contains("overloaded"));
    assert_eq!(take(), [Entry::End(Some(Kind::Overloaded))]);
}

#[tokio::test]
async fn the_callers_predicate_decides_what_is_hollow() {
    let predicate = classify_body(|head, body| {
        (head.status == 200 && body == b"{\"hits\":[]}").then(|| Signal::new(Kind::Empty))
    });
    let layer = ClassifyLayer::new(&provider()).classify(predicate).read_success(1024);
    let sent = call(&layer, reply(200, &[], Full::<Bytes>::from("{\"hits\":[]}"))).await;
    assert_eq!(signal(&sent).kind, Kind::Empty, "the other layers see the stamp");
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Empty), Entry::End(None)]);
    let sent = call(&layer, reply(200, &[], Full::<Bytes>::from("{\"hits\":[1]}"))).await;
    assert_eq!(signal(&sent).kind, Kind::Success);
    let sent = call(&layer, reply(429, &[], Full::<Bytes>::from(OPENAI_EMPTY))).await;
    assert_eq!(signal(&sent).kind, Kind::Depleted, "where it says nothing, the default does");

    // What a function of the head has decided, the body does not change.
    let head = classify_head(|head| (head.status == 429).then(|| Signal::new(Kind::Overloaded)));
    let layer = ClassifyLayer::new(&provider()).classify(head);
    let sent = call(&layer, reply(429, &[], Full::<Bytes>::from(OPENAI_EMPTY))).await;
    assert_eq!(signal(&sent).kind, Kind::Overloaded);
}

#[tokio::test]
async fn errors_are_classified_and_stay_what_they_are() {
    let layer = ClassifyLayer::new(&provider());
    let fails = service_fn(|()| {
        future::ready(Err::<http::Response<Empty<Bytes>>, _>(std::io::Error::from(
            std::io::ErrorKind::ConnectionRefused,
        )))
    });
    let error = layer.layer(fails).oneshot(()).await.unwrap_err();
    assert!(error.is::<std::io::Error>());
    assert!(NotExecuted::is_proven_by(&*error));
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Failed)]);
}

#[tokio::test]
async fn plain_replies_pass_unchanged() {
    let classify = classify_fn(|outcome: Result<&u64, &(dyn std::error::Error + 'static)>| match outcome {
        Ok(0) => Signal::new(Kind::Empty),
        Ok(_) => Signal::new(Kind::Success),
        Err(error) => signal_of_error(error),
    });
    let layer = ClassifyLayer::new(&provider()).classify(classify).replies();
    let mut service =
        layer.layer(service_fn(|n: u64| future::ready(if n < 9 { Ok(n) } else { Err("nine") })));
    assert_eq!(service.ready().await.unwrap().call(1).await.unwrap(), 1);
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Success), Entry::End(None)]);
    assert_eq!(service.ready().await.unwrap().call(0).await.unwrap(), 0);
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Empty), Entry::End(None)]);
    assert_eq!(service.ready().await.unwrap().call(9).await.unwrap_err().to_string(), "nine");
    assert_eq!(take(), [Entry::Begin, Entry::Head(Kind::Failed)]);
    drop(service.ready().await.unwrap().call(1));
    assert_eq!(take(), [Entry::Begin, Entry::Dropped]);
}

#[test]
fn types_fit_where_services_are_borrowed_or_shared() {
    fn is<T: Send + Sync + Default>() {}
    is::<SensedBody<Full<Bytes>>>();
    // Borrowed, neither `Clone` nor `'static`.
    struct Next<'a>(&'a str);
    impl Service<&'static str> for Next<'_> {
        type Response = http::Response<Full<Bytes>>;
        type Error = Infallible;
        type Future = future::Ready<Result<Self::Response, Infallible>>;
        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }
        fn call(&mut self, _: &'static str) -> Self::Future {
            future::ready(Ok(http::Response::new(Full::from(self.0.to_owned()))))
        }
    }
    let text = "x".to_owned();
    let mut service = ClassifyLayer::new(&provider()).layer(Next(&text));
    assert!(service.call("").now_or_never().unwrap().is_ok());
}

#[tokio::test]
async fn size_hints_and_ends_are_forwarded() {
    struct Sized;
    impl Body for Sized {
        type Data = Bytes;
        type Error = Infallible;
        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(Some(Ok(Frame::data(BytesMut::zeroed(4).freeze()))))
        }
        fn size_hint(&self) -> SizeHint {
            let mut hint = SizeHint::new();
            hint.set_lower(3);
            hint.set_upper(u64::MAX - 1);
            hint
        }
    }
    let layer = ClassifyLayer::new(&provider()).read_error(6, Duration::from_secs(1));
    let sent = call(&layer, reply(200, &[], Sized)).await;
    assert_eq!((sent.body().size_hint().lower(), sent.body().is_end_stream()), (3, false));
    let sent = call(&layer, reply(500, &[], Sized)).await;
    let hint = sent.body().size_hint();
    assert_eq!((hint.lower(), hint.upper()), (8 + 3, None), "saturates");
    let sent = call(&layer, reply(500, &[], Full::<Bytes>::from("abc"))).await;
    assert_eq!(sent.body().size_hint().exact(), Some(3));
}

/// "How often are we throttled, by whom?": one event for each reply that is no plain success.
#[test]
fn what_is_no_plain_success_is_an_event() {
    use tracing::field::{Field, Visit};
    use tracing_subscriber::{layer::SubscriberExt, registry};

    #[derive(Clone, Default)]
    struct Seen(std::sync::Arc<std::sync::Mutex<Vec<String>>>);
    struct Fields(String);
    impl Visit for Fields {
        fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
            self.0 += &format!("{}={value:?} ", field.name());
        }
    }
    impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Seen {
        fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
            let mut fields = Fields(String::new());
            event.record(&mut fields);
            self.0.lock().unwrap().push(fields.0);
        }
    }

    let seen = Seen::default();
    tracing::subscriber::with_default(registry().with(seen.clone()), || {
        let layer = ClassifyLayer::new(&provider());
        for status in [200, 429, 404] {
            let sent = reply(status, &[("retry-after", "3")], Empty::<Bytes>::new());
            call(&layer, sent).now_or_never().unwrap();
        }
        let trailers = script([Trailers(&[("grpc-status", "14")])]);
        let sent = call(&layer, reply(200, &[], trailers)).now_or_never().unwrap();
        sent.into_body().collect().now_or_never().unwrap().unwrap();
    });
    let seen = seen.0.lock().unwrap();
    let expected = [
        ["throttled", "wait_ms=3000"],
        // What the provider makes of it.
        ["paused", "wait_ms=3000"],
        ["signal", "rejected"],
        ["signal", "failed"],
    ];
    assert_eq!(seen.len(), expected.len(), "{seen:?}");
    for (event, parts) in seen.iter().zip(expected) {
        assert!(parts.iter().all(|part| event.contains(part)) && event.contains("provider=\"p\""), "{event}");
    }
}
