//! The futures of [`ClassifyLayer`](crate::ClassifyLayer).

use super::{Classify, report::Report};
use crate::{BoxError, Kind};
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tower_service::Service;

#[cfg(feature = "http")]
pub use bodies::ResponseFuture;

pin_project! {
    /// The future of a [`Classified`](super::Classified) service for replies of any type.
    pub struct ReplyFuture<F, C> {
        #[pin]
        inner: F,
        report: Option<Report>,
        classify: C,
    }
}

impl<F, C> ReplyFuture<F, C> {
    // The inner future is made where it will stay, in the result: it may be large, and to move it costs.
    #[inline]
    pub(super) fn call<S, Req>(service: &mut S, request: Req, report: Report, classify: C) -> Self
    where
        S: Service<Req, Future = F>,
    {
        ReplyFuture { inner: service.call(request), report: Some(report), classify }
    }

    /// Calls `service` as if this layer were not there.
    #[cold]
    #[inline(never)]
    pub(super) fn pass<S, Req>(service: &mut S, request: Req, classify: C) -> Self
    where
        S: Service<Req, Future = F>,
    {
        ReplyFuture { inner: service.call(request), report: None, classify }
    }
}

impl<F, C, Res, E> Future for ReplyFuture<F, C>
where
    F: Future<Output = Result<Res, E>>,
    E: Into<BoxError>,
    C: Classify<Res>,
{
    type Output = Result<Res, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let me = self.project();
        let mut outcome = ready!(me.inner.poll(cx)).map_err(Into::into);
        // In its place: to take it out would move it.
        let Some(report) = me.report else { return Poll::Ready(outcome) };
        let mut signal = match &outcome {
            Ok(reply) => me.classify.classify(Ok(reply)),
            Err(error) => me.classify.classify(Err(&**error)),
        };
        report.head(&signal);
        signal = report.mark(signal);
        if signal.kind.is_success() {
            report.end(None);
        }
        *me.report = None;
        if let Ok(reply) = &mut outcome
            && signal.kind != Kind::Success
        {
            me.classify.stamp(reply, signal);
        }
        Poll::Ready(outcome)
    }
}

impl<F, C> fmt::Debug for ReplyFuture<F, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplyFuture").finish_non_exhaustive()
    }
}

#[cfg(feature = "http")]
mod bodies {
    use super::{Classify, Future, Pin, Report, Service, pin_project};
    use crate::{
        BoxError, Head, Kind, Signal,
        classify::{
            body::{Replay, SensedBody},
            layer::Options,
        },
        http::stream::{First, Format, Late},
    };
    use bytes::Buf;
    use http_body::{Body, Frame};
    use std::{
        fmt,
        task::{Context, Poll, ready},
        time::Duration,
    };
    use tokio::time::{Sleep, sleep};

    /// A body in more pieces than this is no small body, however few bytes they hold.
    const FRAMES: usize = 4096;

    pin_project! {
        /// The future of a [`Classified`](crate::classify::Classified) service for HTTP replies.
        pub struct ResponseFuture<F, B, C>
        where
            B: Body,
        {
            #[pin]
            state: State<F, B>,
            report: Option<Report>,
            classify: C,
            options: Options,
        }
    }

    pin_project! {
        #[project = StateProj]
        enum State<F, B>
        where
            B: Body,
        {
            Calling { #[pin] inner: F },
            // Only replies that are looked into get here, so the happy path does not pay for the box.
            Reading { reading: Option<Box<Reading<B>>> },
        }
    }

    /// What the head said, and who is to be told. Told when dropped: whoever leaves while the body is being
    /// read does not take a pause with him that the head has named.
    struct Unrefined {
        report: Option<Report>,
        signal: Signal,
    }

    impl Drop for Unrefined {
        fn drop(&mut self) {
            if let Some(mut report) = self.report.take()
                && !self.signal.kind.is_success()
            {
                report.head(&self.signal);
            }
        }
    }

    /// A reply whose body is being read.
    struct Reading<B: Body> {
        parts: http::response::Parts,
        head: Unrefined,
        /// Boxed: what has been polled may not move, and it will be handed out.
        body: Pin<Box<B>>,
        frames: Vec<Frame<B::Data>>,
        seen: Vec<u8>,
        most: usize,
        deadline: Option<Pin<Box<Sleep>>>,
        stream: Option<Format>,
        /// How long a stream that has begun is held back until its first content.
        hold: Duration,
    }

    /// How reading came to its end.
    enum Stop<E> {
        /// All there is.
        End,
        /// All that is wanted, or that there was time for.
        Enough,
        Error(E),
    }

    impl<F, B: Body, C> ResponseFuture<F, B, C> {
        #[inline]
        pub(crate) fn call<S, Req>(
            service: &mut S,
            request: Req,
            report: Report,
            classify: C,
            options: Options,
        ) -> Self
        where
            S: Service<Req, Future = F>,
        {
            let state = State::Calling { inner: service.call(request) };
            ResponseFuture { state, report: Some(report), classify, options }
        }

        /// Calls `service` as if this layer were not there.
        #[cold]
        #[inline(never)]
        pub(crate) fn pass<S, Req>(service: &mut S, request: Req, classify: C, options: Options) -> Self
        where
            S: Service<Req, Future = F>,
        {
            let state = State::Calling { inner: service.call(request) };
            ResponseFuture { state, report: None, classify, options }
        }

        /// Goes on from a call that `report` has watched so far, and that `inner` ends.
        #[cfg(feature = "herd")]
        pub(crate) fn resume(inner: F, report: Option<Report>, classify: C, options: Options) -> Self {
            ResponseFuture { state: State::Calling { inner }, report, classify, options }
        }
    }

    impl<F, B, C, E> Future for ResponseFuture<F, B, C>
    where
        F: Future<Output = Result<http::Response<B>, E>>,
        E: Into<BoxError>,
        B: Body,
        C: Classify<http::Response<B>>,
    {
        type Output = Result<http::Response<SensedBody<B>>, BoxError>;

        fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
            let mut me = self.project();
            loop {
                match me.state.as_mut().project() {
                    StateProj::Calling { inner } => {
                        let reply = match ready!(inner.poll(cx)) {
                            Ok(reply) => reply,
                            Err(error) => {
                                let error = error.into();
                                if let Some(mut report) = me.report.take() {
                                    report.head(&me.classify.classify(Err(&*error)));
                                }
                                return Poll::Ready(Err(error));
                            }
                        };
                        let Some(report) = me.report else {
                            let pass = |body| SensedBody::watched(body, None, None);
                            return Poll::Ready(Ok(reply.map(pass)));
                        };
                        let signal = report.read(&*me.classify, &reply);
                        let most = me.options.most(&signal);
                        if most == 0 || !Reading::is_of_use(&reply, &signal, most) {
                            return Poll::Ready(Ok(pass(reply, signal, me.report, me.options)));
                        }
                        let head = Unrefined { report: me.report.take(), signal };
                        let reading = Reading::start(reply, head, me.options, most);
                        me.state.set(State::Reading { reading: Some(reading) });
                    }
                    StateProj::Reading { reading } => {
                        let stop = match reading {
                            Some(reading) => ready!(reading.poll(cx)),
                            None => panic!("polled after it was ready"),
                        };
                        let Some(reading) = reading.take() else { unreachable!("just polled") };
                        return Poll::Ready(Ok(reading.finish(stop, &*me.classify)));
                    }
                }
            }
        }
    }

    /// A reply whose head says it all: it passes, and its body is watched if it is a success.
    #[inline(always)]
    fn pass<B: Body>(
        mut reply: http::Response<B>,
        signal: Signal,
        watch: &mut Option<Report>,
        options: &Options,
    ) -> http::Response<SensedBody<B>> {
        let is_watched = signal.kind.is_success() && !reply.body().is_end_stream();
        if let Some(report) = watch {
            report.head(&signal);
            if signal.kind != Kind::Success {
                reply.extensions_mut().insert(report.mark(signal));
            }
            if !is_watched {
                if signal.kind.is_success() {
                    report.end(None);
                }
                *watch = None;
            }
        }
        let late = if options.success_bytes > 0 && is_watched {
            Format::of(Head::of(&reply).content_type()).map(Late::new)
        } else {
            None
        };
        // One way out, or the reply would be moved together in several places.
        reply.map(|body| SensedBody::watched(body, watch.take(), late))
    }

    impl<B: Body> Reading<B> {
        /// Whether there is something to look into.
        #[cold]
        fn is_of_use(reply: &http::Response<B>, signal: &Signal, most: u32) -> bool {
            let is_success = signal.kind.is_success();
            let kind = Head::of(reply).content_type();
            let is_stream = is_success && Format::of(kind).is_some();
            let is_of_no_use = if is_success {
                // An empty success is looked at: it may be what the caller calls hollow.
                is_long_lived(kind) || (!is_stream && reply.body().size_hint().lower() > u64::from(most))
            } else {
                reply.body().is_end_stream()
            };
            // A stamp is the word of a layer further in that has looked already.
            !is_of_no_use && reply.extensions().get::<Signal>().is_none()
        }

        #[cold]
        fn start(reply: http::Response<B>, head: Unrefined, options: &Options, most: u32) -> Box<Self> {
            let is_success = head.signal.kind.is_success();
            let stream = Format::of(Head::of(&reply).content_type()).filter(|_| is_success);
            let (parts, body) = reply.into_parts();
            let time = Duration::from_millis(options.error_millis.into());
            Box::new(Reading {
                parts,
                head,
                body: Box::pin(body),
                frames: Vec::new(),
                seen: Vec::new(),
                most: most as usize,
                deadline: (!is_success).then(|| Box::pin(sleep(time))),
                stream,
                hold: Duration::from_millis(options.hold_millis.into()),
            })
        }

        fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Stop<B::Error>> {
            while self.seen.len() < self.most && self.frames.len() < FRAMES {
                let frame = match self.body.as_mut().poll_frame(cx) {
                    Poll::Ready(None) => return Poll::Ready(Stop::End),
                    Poll::Ready(Some(Err(error))) => return Poll::Ready(Stop::Error(error)),
                    Poll::Ready(Some(Ok(frame))) => frame,
                    Poll::Pending => {
                        return match &mut self.deadline {
                            Some(deadline) => deadline.as_mut().poll(cx).map(|()| Stop::Enough),
                            None => Poll::Pending,
                        };
                    }
                };
                let mut is_whole = true;
                if let Some(data) = frame.data_ref() {
                    let chunk = data.chunk();
                    is_whole = chunk.len() == data.remaining();
                    self.seen.extend_from_slice(&chunk[..chunk.len().min(self.most - self.seen.len())]);
                }
                self.frames.push(frame);
                let is_told = match self.stream.map(|format| format.first(&self.seen)) {
                    None | Some(First::Incomplete) => false,
                    Some(First::Preamble) if !self.hold.is_zero() => {
                        self.deadline.get_or_insert_with(|| Box::pin(sleep(self.hold)));
                        false
                    }
                    Some(_) => true,
                };
                // Of a frame in several pieces only the first can be seen without taking it apart.
                if is_told || !is_whole {
                    return Poll::Ready(Stop::Enough);
                }
            }
            Poll::Ready(Stop::Enough)
        }

        fn finish<C>(self, stop: Stop<B::Error>, classify: &C) -> http::Response<SensedBody<B>>
        where
            C: Classify<http::Response<B>>,
        {
            let Reading { mut parts, mut head, body, frames, seen, stream, .. } = self;
            let mut signal = classify.refine(Head::of_parts(&parts), &seen, head.signal);
            let report = head.report.take();
            let (error, rest) = match stop {
                Stop::End => (None, None),
                Stop::Enough => (None, Some(body)),
                Stop::Error(error) => {
                    if signal.kind.is_success() {
                        signal = Signal::new(Kind::Failed);
                    }
                    (Some(error), None)
                }
            };
            let mut watch = None;
            if let Some(mut report) = report {
                report.head(&signal);
                signal = report.mark(signal);
                if signal.kind.is_success() {
                    match rest {
                        Some(_) => watch = Some(report),
                        None => report.end(None),
                    }
                }
            }
            if signal.kind != Kind::Success {
                parts.extensions.insert(signal);
            }
            let late = watch.as_ref().and(stream).map(Late::new);
            let body = SensedBody::replayed(Replay::new(frames, error, rest), watch, late);
            http::Response::from_parts(parts, body)
        }
    }

    /// Kinds of bodies that carry no small answer, or are sent line by line over a long time.
    fn is_long_lived(content_type: &[u8]) -> bool {
        const LONG: [&[u8]; 8] = [
            b"application/grpc",
            b"application/octet-stream",
            b"application/x-ndjson",
            b"application/jsonl",
            b"application/stream+json",
            b"audio/",
            b"image/",
            b"video/",
        ];
        LONG.iter().any(|kind| content_type.starts_with(kind))
    }

    impl<F, B: Body, C> fmt::Debug for ResponseFuture<F, B, C> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("ResponseFuture").finish_non_exhaustive()
        }
    }
}
