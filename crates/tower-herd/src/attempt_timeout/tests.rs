use super::*;
use crate::{BoxError, Executed, HasTask, Kind, Task, classify::signal_of_error};
use futures_util::{FutureExt, future};
use std::{convert::Infallible, time::Duration};
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceExt, service_fn};

const SECOND: Duration = Duration::from_secs(1);

fn timeout(error: &BoxError) -> AttemptTimeout {
    *error.downcast_ref().unwrap_or_else(|| panic!("not a timeout: {error}"))
}

/// A request of our own, with its task.
struct Request(Option<Task>);
impl HasTask for Request {
    fn task(&self) -> Option<&Task> {
        self.0.as_ref()
    }
}

/// How long a call that is never answered takes, and the error it ends with.
async fn silent(
    layer: AttemptTimeoutLayer<crate::classify::Replies>,
    task: Option<Task>,
) -> (Duration, AttemptTimeout) {
    let start = Instant::now();
    let inner = service_fn(|_: Request| future::pending::<Result<(), Infallible>>());
    let error = layer.layer(inner).oneshot(Request(task)).await.unwrap_err();
    let signal = signal_of_error(&*error);
    assert_eq!((signal.kind, signal.executed), (Kind::Failed, Executed::Maybe));
    (start.elapsed(), timeout(&error))
}

#[tokio::test(start_paused = true)]
async fn the_timeout_is_its_own_or_what_is_left_of_the_task() {
    // Own timeout, time that the task has left, how long it takes.
    for (own, left, expected) in
        [(30, None, 30), (5, None, 5), (5, Some(60), 5), (30, Some(10), 10), (30, Some(0), 0)]
    {
        let task = left.map(|left| Task::new(1).deadline_in(SECOND * left));
        let (took, timeout) = silent(AttemptTimeoutLayer::new(SECOND * own).replies(), task).await;
        assert_eq!(took, SECOND * expected, "own {own}");
        assert_eq!(timeout, AttemptTimeout { phase: Phase::Headers, after: SECOND * expected });
    }
    let (took, _) = silent(AttemptTimeoutLayer::default().replies(), Some(Task::new("open"))).await;
    assert_eq!(took, SECOND * 30);
}

#[tokio::test(start_paused = true)]
async fn no_timeout_is_too_long() {
    let inner = service_fn(|(): ()| future::pending::<Result<(), Infallible>>());
    let mut call = Box::pin(AttemptTimeoutLayer::new(Duration::MAX).replies().layer(inner).oneshot(()));
    assert!((&mut call).now_or_never().is_none());
    sleep(SECOND * 3600 * 24 * 365).await;
    assert!(call.now_or_never().is_none());
}

#[tokio::test(start_paused = true)]
async fn answers_in_time_pass() {
    let inner = service_fn(|n: u64| async move {
        sleep(SECOND * 9).await;
        if n == 0 { Err("zero") } else { Ok(n) }
    });
    let mut service = AttemptTimeoutLayer::new(SECOND * 10).replies().layer(inner);
    assert_eq!(service.ready().await.unwrap().call(3).await.unwrap(), 3);
    assert_eq!(service.ready().await.unwrap().call(0).await.unwrap_err().to_string(), "zero");
}

#[test]
fn an_answer_that_is_there_at_once_needs_no_timer() {
    // Outside a runtime: making a timer would panic.
    let inner = service_fn(|n: u64| future::ready(Ok::<_, Infallible>(n)));
    let mut service = AttemptTimeoutLayer::new(SECOND).replies().layer(inner);
    assert_eq!(service.call(3).now_or_never().unwrap().unwrap(), 3);
}

#[test]
fn says_what_it_waited_for() {
    let text = |phase| AttemptTimeout { phase, after: SECOND * 3 / 2 }.to_string();
    assert_eq!(text(Phase::Headers), "no answer for 1.5 s");
    assert_eq!(text(Phase::Idle), "the body stood still for 1.5 s");
}

#[cfg(feature = "http")]
mod bodies {
    use super::*;
    use bytes::Bytes;
    use futures_util::stream;
    use http_body::{Body, Frame};
    use http_body_util::{BodyExt, Full, StreamBody};
    use std::pin::Pin;

    type Boxed = Pin<Box<dyn Body<Data = Bytes, Error = BoxError> + Send>>;

    /// The body that comes out when the provider pauses so many seconds before each piece.
    async fn body(idle: u32, pauses: &'static [u32]) -> Boxed {
        let inner = service_fn(move |(): ()| async move {
            let pieces = stream::iter(pauses).then_sleep();
            Ok::<_, Infallible>(http::Response::new(StreamBody::new(pieces)))
        });
        let layer = AttemptTimeoutLayer::new(SECOND).idle(SECOND * idle);
        Box::pin(layer.layer(inner).oneshot(()).await.unwrap().into_body())
    }

    trait ThenSleep: Sized {
        fn then_sleep(self) -> Pin<Box<dyn stream::Stream<Item = Result<Frame<Bytes>, BoxError>> + Send>>;
    }
    impl ThenSleep for stream::Iter<std::slice::Iter<'static, u32>> {
        fn then_sleep(self) -> Pin<Box<dyn stream::Stream<Item = Result<Frame<Bytes>, BoxError>> + Send>> {
            use futures_util::StreamExt;
            Box::pin(self.then(|pause| async move {
                sleep(SECOND * *pause).await;
                Ok(Frame::data(Bytes::from_static(b"x")))
            }))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stands_still_fails() {
        let start = Instant::now();
        let mut body = body(20, &[0, 19, 19, 21]).await;
        for _ in 0..3 {
            body.frame().await.unwrap().unwrap();
        }
        let error = body.frame().await.unwrap().unwrap_err();
        assert_eq!(timeout(&error), AttemptTimeout { phase: Phase::Idle, after: SECOND * 20 });
        assert_eq!(start.elapsed(), SECOND * (19 + 19 + 20));
        assert!(body.frame().await.is_none() && body.is_end_stream());
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_is_not_a_silent_provider() {
        let mut body = body(20, &[1, 1, 15, 1]).await;
        while let Some(frame) = body.frame().await {
            frame.unwrap();
            sleep(SECOND * 100).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_tasks_deadline_does_not_cut_a_body_that_moves() {
        let inner = service_fn(|_: http::Request<()>| async {
            Ok::<_, Infallible>(http::Response::new(StreamBody::new(stream::iter(&[9, 9, 9]).then_sleep())))
        });
        let mut request = http::Request::new(());
        request.set_task(Task::new(1).deadline_in(SECOND));
        let reply = AttemptTimeoutLayer::default().layer(inner).oneshot(request).await.unwrap();
        assert_eq!(reply.into_body().collect().await.unwrap().to_bytes(), "xxx");
    }

    #[test]
    fn bodies_keep_what_they_are() {
        fn is<T: Send + Sync + Default>() {}
        is::<TimedBody<Full<Bytes>>>();
        let body = TimedBody::new(Full::<Bytes>::from("abc"), Some(SECOND), None);
        assert_eq!((body.size_hint().exact(), body.is_end_stream()), (Some(3), false));
        assert!(TimedBody::<Full<Bytes>>::default().is_end_stream());
    }
}
