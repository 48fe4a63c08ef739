use super::*;
use http_body_util::{BodyExt, combinators::UnsyncBoxBody};
use proptest::prelude::*;
use std::collections::VecDeque;

/// The erased body of some client: neither `Clone` nor `Sync`.
#[derive(Default)]
struct Erased(Option<UnsyncBoxBody<Bytes, BoxError>>);

impl Erased {
    fn new<B>(body: B) -> Self
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Erased(Some(body.map_err(Into::into).boxed_unsync()))
    }
}
impl Body for Erased {
    type Data = Bytes;
    type Error = BoxError;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.0.as_mut().map_or(Poll::Ready(None), |body| Pin::new(body).poll_frame(cx))
    }
    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(Body::is_end_stream)
    }
    fn size_hint(&self) -> SizeHint {
        self.0.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

/// A body of these frames; `None` is a Pending. Ends with trailers if there are some, or an error.
#[derive(Clone, Debug)]
struct Scripted {
    frames: VecDeque<Option<Vec<u8>>>,
    trailers: bool,
    breaks: bool,
    exact: bool,
}

impl Body for Scripted {
    type Data = Bytes;
    type Error = BoxError;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.frames.pop_front() {
            Some(None) => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Some(Some(data)) => Poll::Ready(Some(Ok(Frame::data(data.into())))),
            None if std::mem::take(&mut self.breaks) => Poll::Ready(Some(Err("the source broke".into()))),
            None if std::mem::take(&mut self.trailers) => {
                let mut trailers = HeaderMap::new();
                trailers.insert("x-sum", "1".parse().unwrap());
                Poll::Ready(Some(Ok(Frame::trailers(trailers))))
            }
            None => Poll::Ready(None),
        }
    }
    fn size_hint(&self) -> SizeHint {
        match self.exact {
            true => SizeHint::with_exact(self.frames.iter().flatten().map(|f| f.len() as u64).sum()),
            false => SizeHint::default(),
        }
    }
}

/// What a reader saw: bytes, trailers, and how it ended.
#[derive(Debug, PartialEq)]
enum End {
    Whole { trailers: bool },
    Broken,
    Superseded,
    Stopped,
}

fn read(body: &mut Erased, most: usize) -> (Vec<u8>, End) {
    let mut cx = Context::from_waker(Waker::noop());
    let (mut bytes, mut trailers) = (Vec::new(), false);
    for _ in 0..most {
        match Pin::new(&mut *body).poll_frame(&mut cx) {
            Poll::Pending => {}
            Poll::Ready(None) => return (bytes, End::Whole { trailers }),
            Poll::Ready(Some(Err(error))) => {
                let end = if error.is::<Superseded>() { End::Superseded } else { End::Broken };
                return (bytes, end);
            }
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) => bytes.extend_from_slice(&data),
                Err(_) => trailers = true,
            },
        }
    }
    (bytes, End::Stopped)
}

proptest! {
    /// Every reader sees the exact bytes or there is none; a reader of the past never sees an end.
    #[test]
    fn each_reader_sees_the_exact_bytes_or_resend_is_refused(
        frames in prop::collection::vec(prop::option::of(prop::collection::vec(any::<u8>(), 0..9)), 0..12),
        trailers: bool,
        breaks: bool,
        exact: bool,
        cap in 0..60usize,
        // How far each reader goes before it is dropped, and whether it is read on after the next began.
        readers in prop::collection::vec((0..40usize, any::<bool>()), 1..6),
    ) {
        let body = Scripted { frames: frames.clone().into(), trailers, breaks, exact };
        let whole: Vec<u8> = frames.iter().flatten().flatten().copied().collect();
        let resend = replay(cap, Erased::new);
        let mut request = http::Request::new(Erased::new(body));
        let mut kept = resend.keep(&mut request);
        prop_assert_eq!(kept.is_none(), exact && whole.len() > cap);
        if exact {
            prop_assert_eq!(request.body().size_hint().exact(), Some(whole.len() as u64));
        }
        let mut copy = Some(request);
        let mut seen_most = 0;
        let mut broke = false;
        for (polls, read_on) in readers {
            let Some(mut reading) = copy.take() else { break };
            if exact {
                prop_assert_eq!(reading.body().size_hint().exact(), Some(whole.len() as u64));
            }
            let (bytes, end) = read(reading.body_mut(), polls);
            prop_assert!(whole.starts_with(&bytes));
            seen_most = seen_most.max(bytes.len());
            broke |= end == End::Broken;
            match &end {
                End::Whole { trailers: seen } => {
                    prop_assert_eq!(&bytes, &whole);
                    prop_assert!(!breaks && *seen == trailers);
                    prop_assert!(kept.is_none() || reading.body().is_end_stream());
                }
                End::Broken => prop_assert!(breaks),
                End::Superseded => prop_assert!(false, "the newest may read"),
                End::Stopped => {}
            }
            let possible = kept.as_ref().is_some_and(|kept| resend.resendable(kept));
            copy = kept.as_mut().and_then(|kept| resend.again(kept));
            prop_assert_eq!(copy.is_some(), possible);
            prop_assert_eq!(possible, kept.is_some() && seen_most <= cap && !broke);
            if read_on && copy.is_some() && end == End::Stopped {
                // It had all but the end itself already, or it is told; it never passes a part for the whole.
                let (more, after) = read(reading.body_mut(), 99);
                let had_all = matches!(after, End::Whole { .. }) && more.is_empty() && bytes == whole && trailers;
                prop_assert!(after == End::Superseded || had_all, "{:?}", after);
            }
        }
    }
}

#[test]
fn the_copy_is_of_the_same_task_and_head() {
    let task = Task::new("t");
    let mut request = http::Request::put("http://a.example/x")
        .header("k", "v")
        .body(Erased::new(http_body_util::Full::from("body")))
        .unwrap();
    request.set_task(task.clone());
    let resend = replay(64, Erased::new);
    let mut kept = resend.keep(&mut request).unwrap();
    assert!(kept.task().unwrap().is(&task));
    assert_eq!(kept.safety(), Safety::Keyed);
    let copy = resend.again(&mut kept).unwrap();
    assert!(copy.task().unwrap().is(&task));
    assert_eq!(
        (copy.method(), copy.uri().path(), &copy.headers()["k"]),
        (&http::Method::PUT, "/x", &"v".parse().unwrap())
    );
}

#[test]
fn an_empty_body_is_not_wrapped() {
    let mut request = http::Request::new(Erased::default());
    let resend = replay(64, |_| panic!("wrapped"));
    let mut kept = resend.keep(&mut request).unwrap();
    assert!(resend.again(&mut kept).unwrap().body().is_end_stream());
}

#[test]
fn a_reader_that_waits_is_woken_when_it_is_superseded() {
    struct Stalled;
    impl Body for Stalled {
        type Data = Bytes;
        type Error = BoxError;
        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
            Poll::Pending
        }
    }
    let mut request = http::Request::new(Erased::new(Stalled));
    let resend = replay(64, Erased::new);
    let mut kept = resend.keep(&mut request).unwrap();
    let mut task =
        tokio_test::task::spawn(async move { request.into_body().frame().await.unwrap().unwrap_err() });
    assert!(task.poll().is_pending());
    let _copy = resend.again(&mut kept).unwrap();
    assert!(task.is_woken());
    assert!(matches!(task.poll(), Poll::Ready(error) if error.is::<Superseded>()));
}
