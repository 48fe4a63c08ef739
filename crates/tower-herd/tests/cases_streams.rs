//! Public reports about streams that fail after a good head, through the whole stack: retry, ladder, pause,
//! limit, sensor.
#![cfg(feature = "http")]

use bytes::Bytes;
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use std::{
    collections::VecDeque,
    convert::Infallible,
    future::ready,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::{Instant, Sleep};
use tower::{Layer, ServiceBuilder, ServiceExt, service_fn};
use tower_herd::{
    BoxError, ClassifyLayer, Exhausted, Fleet, FleetLimitLayer, HashedFailover, JitteredRetryLayer, Kind,
    Provider, ProviderSettings, RetryAfterLayer, Safety, Signal, Task,
    failover::Rung,
    observe::{Event, Observe},
};

/// What a body does next.
#[derive(Clone)]
enum Step {
    Data(Bytes),
    Wait(u64),
    Reset,
}
use Step::{Data, Reset, Wait};

fn text(text: &'static str) -> Step {
    Data(Bytes::from_static(text.as_bytes()))
}

struct Stream {
    steps: VecDeque<Step>,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Body for Stream {
    type Data = Bytes;
    type Error = BoxError;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            if let Some(sleep) = &mut self.sleep {
                std::task::ready!(sleep.as_mut().poll(cx));
                self.sleep = None;
            }
            return Poll::Ready(match self.steps.pop_front() {
                Some(Wait(millis)) => {
                    self.sleep = Some(Box::pin(tokio::time::sleep(Duration::from_millis(millis))));
                    continue;
                }
                Some(Data(data)) => Some(Ok(Frame::data(data))),
                Some(Reset) => Some(Err("connection reset".into())),
                None => None,
            });
        }
    }
}

type Request = http::Request<String>;
type Sensor = ClassifyLayer;

/// What the n-th call at a rung gets, whichever rung it is.
#[derive(Clone, Default)]
struct World {
    replies: Arc<Mutex<VecDeque<Vec<Step>>>>,
    calls: Arc<AtomicUsize>,
    content_type: &'static str,
    told: Arc<Mutex<Vec<(String, Kind)>>>,
}

/// Notes what the sensor reports.
struct Told(Arc<Mutex<Vec<(String, Kind)>>>);
impl Observe for Told {
    fn observe(&self, event: &Event<'_>) {
        if let Event::Signal { provider, kind, .. } = *event {
            self.0.lock().unwrap().push((provider.to_owned(), kind));
        }
    }
}

const SSE: &str = "text/event-stream";
const AMAZON: &str = "application/vnd.amazon.eventstream";

impl World {
    fn new<const N: usize>(content_type: &'static str, replies: [Vec<Step>; N]) -> Self {
        World { replies: Arc::new(Mutex::new(replies.into())), content_type, ..World::default() }
    }

    fn reply(&self) -> http::Response<Stream> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let steps = self.replies.lock().unwrap().pop_front().expect("no more calls than replies");
        let body = Stream { steps: steps.into(), sleep: None };
        http::Response::builder().header("content-type", self.content_type).body(body).unwrap()
    }

    /// One call through the whole stack over two rungs.
    async fn call(&self, sensor: impl Fn(&Provider) -> Sensor, safety: Safety) -> Answer {
        let fleet = Fleet::local().seed(1).observer(Told(self.told.clone()));
        let providers: Vec<Provider> = ["one", "two"]
            .map(|name| fleet.configure(name, ProviderSettings::new().ceiling(5)).unwrap())
            .into();
        let rungs = providers.iter().enumerate().map(|(tier, provider)| {
            let world = self.clone();
            let service = ServiceBuilder::new()
                .layer(RetryAfterLayer::new(provider))
                .layer(FleetLimitLayer::new(provider))
                .layer(sensor(provider))
                .service(service_fn(move |_: Request| ready(Ok::<_, Infallible>(world.reply()))));
            Rung::new(provider, service).tier(tier as u32)
        });
        let retry = JitteredRetryLayer::new().budget(tower_herd::retry::Unlimited).seed(1);
        let stack = retry.layer(HashedFailover::new(rungs).unwrap());
        let mut request = http::Request::post("http://llm.example/").body(String::new()).unwrap();
        request.extensions_mut().insert(safety);
        request.extensions_mut().insert(Task::new(1).deadline_in(Duration::from_secs(600)));
        let start = Instant::now();
        let reply = stack.oneshot(request).await.unwrap();
        let (parts, body) = reply.into_parts();
        let mut seen = Answer {
            head_after: start.elapsed(),
            body: vec![],
            broke: false,
            signal: parts.extensions.get::<Signal>().copied(),
            exhausted: parts.extensions.get::<Exhausted>().is_some(),
        };
        let mut body = Box::pin(body);
        while let Some(frame) = body.as_mut().frame().await {
            match frame {
                Ok(frame) => seen.body.extend(frame.into_data().unwrap()),
                Err(_) => seen.broke = true,
            }
        }
        drop(body);
        for provider in providers {
            assert_eq!((provider.in_flight(), provider.waiting()), (0, 0), "{provider:?}");
        }
        seen
    }

    fn calls(&self) -> usize {
        assert!(self.replies.lock().unwrap().is_empty(), "every reply was asked for");
        self.calls.load(Ordering::Relaxed)
    }
    fn told(&self) -> Vec<(String, Kind)> {
        self.told.lock().unwrap().clone()
    }
}

/// What the caller saw.
struct Answer {
    head_after: Duration,
    body: Vec<u8>,
    broke: bool,
    signal: Option<Signal>,
    exhausted: bool,
}

impl Answer {
    fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
}

fn looking(provider: &Provider) -> Sensor {
    ClassifyLayer::new(provider).read_success(4096)
}
fn holding(provider: &Provider) -> Sensor {
    ClassifyLayer::new(provider).hold_until_content(Duration::from_secs(5))
}

const PING: &str = ": ping\n\n";
const START: &str = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{}}\n\n";
const DELTA: &str =
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"Hello\"}}\n\n";
const STOP: &str = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
const OVERLOADED: &str = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded\"}}\n\n";

fn good() -> Vec<Step> {
    vec![text(START), Wait(10), text(DELTA), text(STOP)]
}
fn whole() -> String {
    [START, DELTA, STOP].concat()
}

// Growth-Circle/cadis#412, BerriAI/litellm#32835, zirkelc/ai-retry#51; anthropics/anthropic-sdk-python#1258:
// an answer and a half in one message, two begins in one stream.
#[tokio::test(start_paused = true)]
async fn cadis_412_litellm_32835_ai_retry_51_an_error_before_content_is_never_seen() {
    for first in [
        vec![text(OVERLOADED)],
        vec![text(PING), Wait(500), text(OVERLOADED)],
        vec![text("event: ping\ndata: {\"type\": \"ping\"}\n\n"), text(OVERLOADED), Reset],
        // Nothing came at all.
        vec![Wait(20), Reset],
        vec![text(PING), Reset],
        // In one piece with what comes before content, it is seen in time without being waited for.
        vec![Data(Bytes::from([START, OVERLOADED].concat()))],
    ] {
        let world = World::new(SSE, [first, good()]);
        let answer = world.call(looking, Safety::Costly).await;
        assert_eq!((answer.text(), answer.broke, answer.signal), (&*whole(), false, None));
        assert_eq!(world.calls(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn litellm_32835_what_comes_before_content_is_held_back_if_asked() {
    let begun = || vec![text(START), Wait(300), text(PING), Wait(300)];
    for then in [text(OVERLOADED), Reset] {
        let failing = || [begun(), vec![then.clone()]].concat();
        let world = World::new(SSE, [failing(), good()]);
        let answer = world.call(holding, Safety::Costly).await;
        assert_eq!((answer.text(), answer.broke), (&*whole(), false));
        assert_eq!(world.calls(), 2);

        // Not asked: it was handed out at once, and so it stays.
        let world = World::new(SSE, [failing()]);
        let answer = world.call(looking, Safety::Costly).await;
        assert!(answer.text().starts_with(START) && answer.head_after.is_zero());
        assert_eq!(world.calls(), 1);
    }
}

// The price of it: the head comes with the first content, or when the time is over.
#[tokio::test(start_paused = true)]
async fn how_long_a_stream_is_held_back() {
    let after = |millis| vec![text(START), Wait(millis), text(DELTA), text(STOP)];
    for (content_after, head_after) in [(700, 700), (4999, 4999), (5001, 5000), (60_000, 5000)] {
        let world = World::new(SSE, [after(content_after)]);
        let answer = world.call(holding, Safety::Costly).await;
        assert_eq!(answer.text(), whole(), "however it was held back, it is whole");
        let late = answer.head_after.as_millis() as u64 - head_after;
        assert!(late <= 1, "{content_after}: {:?}", answer.head_after);
    }
    // Until the first event it waits without that limit: nothing would be gained by handing out nothing.
    let world = World::new(SSE, [[vec![Wait(20_000)], after(1)].concat()]);
    assert_eq!(world.call(holding, Safety::Costly).await.head_after, Duration::from_millis(20_001));
    // No more is held back than `read_success` bytes.
    let small =
        |p: &Provider| ClassifyLayer::new(p).read_success(100).hold_until_content(Duration::from_secs(5));
    let world = World::new(SSE, [[vec![text(START), text(START)], after(1000)].concat()]);
    assert_eq!(world.call(small, Safety::Costly).await.head_after, Duration::ZERO);
    // Zero: not at all.
    let not = |p: &Provider| ClassifyLayer::new(p).read_success(100).hold_until_content(Duration::ZERO);
    let world = World::new(SSE, [after(1000)]);
    assert_eq!(world.call(not, Safety::Costly).await.head_after, Duration::ZERO);
}

// Law 4 does not stop at streams: what must not be repeated is not, though nobody has seen anything.
#[tokio::test(start_paused = true)]
async fn a_stream_that_must_not_run_twice_is_returned_as_it_failed() {
    let world = World::new(SSE, [vec![text(OVERLOADED)]]);
    let answer = world.call(looking, Safety::Once).await;
    assert_eq!((answer.text(), world.calls()), (OVERLOADED, 1));
    assert_eq!(answer.signal.map(|signal| signal.kind), Some(Kind::Overloaded), "told apart from a success");
}

#[tokio::test(start_paused = true)]
async fn ai_retry_51_an_error_after_content_is_passed_on_reported_and_not_repeated() {
    let events = [DELTA, OVERLOADED].concat();
    for steps in [
        vec![text(START), text(DELTA), Wait(1000), text(OVERLOADED)],
        vec![text(DELTA), Wait(1000), text(OVERLOADED), Reset],
        // In one piece with the content, and cut in the middle.
        vec![Data(Bytes::from(events.clone()))],
        vec![
            text(DELTA),
            Data(Bytes::from(OVERLOADED.as_bytes()[..20].to_vec())),
            Wait(1),
            Data(Bytes::from(OVERLOADED.as_bytes()[20..].to_vec())),
        ],
    ] {
        for sensor in [looking, holding] {
            let world = World::new(SSE, [steps.clone()]);
            let answer = world.call(sensor, Safety::Costly).await;
            assert!(answer.text().ends_with(&events), "{}", answer.text());
            assert_eq!((answer.signal, answer.exhausted, world.calls()), (None, false, 1));
            assert_eq!(world.told(), [("one".to_owned(), Kind::Overloaded)], "once, by the provider's name");
        }
    }
    // A connection that breaks is a failure, and the caller sees it break.
    let world = World::new(SSE, [vec![text(DELTA), Wait(10), Reset]]);
    let answer = world.call(holding, Safety::Costly).await;
    assert_eq!((answer.text(), answer.broke, world.calls()), (DELTA, true, 1));
    assert_eq!(world.told(), [("one".to_owned(), Kind::Failed)]);
}

// BerriAI/litellm#33273, #39462: the tokens of a stream that was given up vanish. Here each attempt is a call
// of its own at its provider, with its own end; who counts tokens there counts both.
#[tokio::test(start_paused = true)]
async fn litellm_33273_39462_each_attempt_is_told_to_its_provider() {
    let world = World::new(SSE, [vec![text(START), Wait(5), text(OVERLOADED)], good()]);
    world.call(holding, Safety::Costly).await;
    assert_eq!(world.told(), [("one".to_owned(), Kind::Overloaded)]);
    assert_eq!(world.calls(), 2);
}

/// A message of Amazon's event stream, its checksums zero.
fn message(kind: &str, name: &str, payload: &str) -> Vec<u8> {
    let mut headers = vec![];
    for (header, value) in [(":message-type", kind), (&*format!(":{kind}-type"), name)] {
        headers.push(header.len() as u8);
        headers.extend(header.bytes());
        headers.extend([7, 0, value.len() as u8]);
        headers.extend(value.bytes());
    }
    let mut all = ((16 + headers.len() + payload.len()) as u32).to_be_bytes().to_vec();
    all.extend((headers.len() as u32).to_be_bytes());
    all.extend([0; 4]);
    all.extend(headers);
    all.extend(payload.bytes());
    all.extend([0; 4]);
    all
}

// maximhq/bifrost#2480: Bedrock says it in a frame of a 200, and whoever counts retries never sees it.
#[tokio::test(start_paused = true)]
async fn bifrost_2480_an_exception_frame_before_content_is_a_failed_call() {
    let data = |bytes: Vec<u8>| Data(bytes.into());
    let exception = |name| message("exception", name, "{\"message\":\"Too many requests\"}");
    let start = || message("event", "messageStart", "{\"role\":\"assistant\"}");
    let delta = || message("event", "contentBlockDelta", "{\"delta\":{\"text\":\"Hello\"}}");
    let good = || vec![data(start()), Wait(5), data(delta())];
    let whole = [start(), delta()].concat();
    for (name, kind) in [
        ("throttlingException", Kind::Throttled),
        ("modelTimeoutException", Kind::Failed),
        ("internalServerException", Kind::Failed),
        ("serviceUnavailableException", Kind::Failed),
    ] {
        // The frame in two pieces.
        let (head, tail) = (exception(name)[..30].to_vec(), exception(name)[30..].to_vec());
        let world = World::new(AMAZON, [vec![data(head), Wait(3), data(tail)], good()]);
        let answer = world.call(looking, Safety::Costly).await;
        assert_eq!((answer.body, answer.signal, world.calls()), (whole.clone(), None, 2), "{name}");
        assert_eq!(world.told(), [("one".to_owned(), kind)]);

        let world = World::new(AMAZON, [vec![data(start()), Wait(3), data(exception(name))], good()]);
        let answer = world.call(holding, Safety::Costly).await;
        assert_eq!((answer.body, world.calls()), (whole.clone(), 2), "{name}, after the begin");

        // After content: passed on as it is, and told.
        let late = [vec![data(start()), data(delta())], vec![data(exception(name))]].concat();
        let world = World::new(AMAZON, [late]);
        let answer = world.call(holding, Safety::Costly).await;
        assert_eq!(answer.body, [&*whole, &*exception(name)].concat());
        assert_eq!((world.calls(), world.told()), (1, vec![("one".to_owned(), kind)]), "{name}");
    }
    // What is the request's fault is not sent again.
    let world = World::new(AMAZON, [vec![data(exception("validationException"))]]);
    let answer = world.call(looking, Safety::Costly).await;
    assert_eq!(answer.signal.map(|signal| signal.kind), Some(Kind::Rejected));
    assert_eq!(world.calls(), 1);
}

// e2b-dev/E2B#1666, block/buzz#1916: the slot of a stream is held until its end, that of a failed attempt not.
#[tokio::test(start_paused = true)]
async fn e2b_1666_a_stream_that_failed_before_content_gives_its_slot_back_at_once() {
    let provider = Fleet::local().configure("llm", ProviderSettings::new().ceiling(1).aborts(true)).unwrap();
    let world = World::new(SSE, [vec![text(START), text(OVERLOADED), Wait(60_000)], good()]);
    let inner = {
        let world = world.clone();
        service_fn(move |_: Request| ready(Ok::<_, Infallible>(world.reply())))
    };
    let retry = JitteredRetryLayer::new().budget(tower_herd::retry::Unlimited).seed(1);
    let stack = ServiceBuilder::new()
        .layer(retry)
        .layer(FleetLimitLayer::new(&provider))
        .layer(holding(&provider))
        .service(inner);
    let request = http::Request::get("http://llm.example/").body(String::new()).unwrap();
    let start = Instant::now();
    // With one slot, and the first stream still open at its end, only its slot given back lets it go on.
    let reply = stack.oneshot(request).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert_eq!(provider.in_flight(), 1, "held while the stream runs");
    assert_eq!(reply.into_body().collect().await.unwrap().to_bytes(), whole());
    assert_eq!(provider.in_flight(), 0);
}
