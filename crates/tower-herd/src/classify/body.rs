//! The body of a reply that passed the sensor.

use super::report::Report;
use crate::{
    Kind, Signal,
    http::{body::Found, dialect, grpc, head::wall_clock, stream::Late},
};
use bytes::Buf;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use std::{
    collections::VecDeque,
    fmt,
    pin::Pin,
    sync::{Mutex, PoisonError},
    task::{Context, Poll},
};

pin_project! {
    /// The body behind [`ClassifyLayer`](crate::ClassifyLayer).
    ///
    /// It reports how the reply ended after a good head: trailers with a `grpc-status` that is not 0,
    /// an error of the body, or a drop before the end. Frames that the sensor has read come first,
    /// as they were.
    pub struct SensedBody<B>
    where
        B: Body,
    {
        #[pin]
        inner: Inner<B>,
        report: Option<Report>,
        // Looks for error events in a stream.
        late: Option<Box<Late>>,
    }
}

pin_project! {
    #[project = InnerProj]
    enum Inner<B>
    where
        B: Body,
    {
        Untouched { #[pin] body: B },
        // The lock is never contended (`&mut` reaches through it): it makes the body `Sync` though
        // the error or the data of `B` may not be.
        Replayed { replay: Box<Mutex<Replay<B>>> },
    }
}

impl<B: Body> Inner<B> {
    #[inline]
    fn is_end_stream(&self) -> bool {
        match self {
            Inner::Untouched { body } => body.is_end_stream(),
            Inner::Replayed { replay } => {
                replay.lock().unwrap_or_else(PoisonError::into_inner).is_end_stream()
            }
        }
    }
}

/// An error event in a frame of a stream. Of a frame in several pieces only the first can be seen, and after it
/// where the next event begins is known no more.
#[cold]
fn hidden<D: Buf>(late: &mut Option<Box<Late>>, frame: &Frame<D>) -> Option<Signal> {
    let data = frame.data_ref()?;
    let found = late.as_mut()?.look(data.chunk());
    if data.chunk().len() < data.remaining() {
        *late = None;
    }
    found.map(said)
}

#[cold]
fn said(found: Found) -> Signal {
    dialect::hidden(found, &http::HeaderMap::new(), wall_clock)
}

type NextFrame<B> = Result<Frame<<B as Body>::Data>, <B as Body>::Error>;

/// What has been read of a body, and the rest of it.
pub(crate) struct Replay<B: Body> {
    frames: VecDeque<Frame<B::Data>>,
    error: Option<B::Error>,
    rest: Option<Pin<Box<B>>>,
}

impl<B: Body> Replay<B> {
    pub(crate) fn new(
        frames: Vec<Frame<B::Data>>,
        error: Option<B::Error>,
        rest: Option<Pin<Box<B>>>,
    ) -> Self {
        Replay { frames: frames.into(), error, rest }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<NextFrame<B>>> {
        if let Some(frame) = self.frames.pop_front() {
            return Poll::Ready(Some(Ok(frame)));
        }
        if let Some(error) = self.error.take() {
            return Poll::Ready(Some(Err(error)));
        }
        match &mut self.rest {
            Some(rest) => rest.as_mut().poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty() && self.error.is_none() && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let read =
            self.frames.iter().filter_map(Frame::data_ref).map(|data| data.remaining() as u64).sum::<u64>();
        match &self.rest {
            // A body that ends in an error has no size.
            None if self.error.is_some() => SizeHint::default(),
            None => SizeHint::with_exact(read),
            Some(rest) => {
                let rest = rest.size_hint();
                let mut hint = SizeHint::new();
                if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(read)) {
                    hint.set_upper(upper);
                    hint.set_lower(rest.lower().saturating_add(read).min(upper));
                } else {
                    hint.set_lower(rest.lower().saturating_add(read));
                }
                hint
            }
        }
    }
}

impl<B: Body> SensedBody<B> {
    pub(crate) fn unwatched(body: B) -> Self {
        SensedBody { inner: Inner::Untouched { body }, report: None, late: None }
    }

    pub(crate) fn watched(body: B, report: Option<Report>, late: Option<Box<Late>>) -> Self {
        SensedBody { inner: Inner::Untouched { body }, report, late }
    }

    pub(crate) fn replayed(replay: Replay<B>, report: Option<Report>, late: Option<Box<Late>>) -> Self {
        SensedBody { inner: Inner::Replayed { replay: Box::new(Mutex::new(replay)) }, report, late }
    }
}

#[cfg(test)]
impl<B: Body> SensedBody<B> {
    pub(crate) fn inner_is_untouched(&self) -> bool {
        matches!(self.inner, Inner::Untouched { .. })
    }
}

impl<B: Body + Default> Default for SensedBody<B> {
    fn default() -> Self {
        Self::unwatched(B::default())
    }
}

impl<B: Body> From<B> for SensedBody<B> {
    fn from(body: B) -> Self {
        Self::unwatched(body)
    }
}

impl<B: Body> Body for SensedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    #[inline]
    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let mut me = self.project();
        // Returned as it is: a frame is large, and to wrap it again would move it.
        let polled = match me.inner.as_mut().project() {
            InnerProj::Untouched { body } => body.poll_frame(cx),
            InnerProj::Replayed { replay } => {
                replay.get_mut().unwrap_or_else(PoisonError::into_inner).poll(cx)
            }
        };
        let Some(report) = me.report else { return polled };
        let late = match &polled {
            Poll::Pending => return polled,
            Poll::Ready(None) => me.late.as_mut().and_then(|late| late.end()).map(said),
            Poll::Ready(Some(Ok(frame))) if frame.is_data() => {
                let found = if me.late.is_some() { hidden(me.late, frame) } else { None };
                if found.is_none() && !me.inner.is_end_stream() {
                    return polled;
                }
                found.or_else(|| me.late.as_mut().and_then(|late| late.end()).map(said))
            }
            Poll::Ready(Some(Ok(frame))) => match frame.trailers_ref() {
                Some(trailers) => grpc::trailers(trailers),
                None if me.inner.is_end_stream() => None,
                None => return polled,
            },
            Poll::Ready(Some(Err(_))) => Some(Signal::new(Kind::Failed)),
        };
        report.end(late.as_ref());
        *me.report = None;
        polled
    }

    #[inline]
    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Untouched { body } => body.size_hint(),
            Inner::Replayed { replay } => replay.lock().unwrap_or_else(PoisonError::into_inner).size_hint(),
        }
    }
}

impl<B: Body> fmt::Debug for SensedBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_replayed = matches!(self.inner, Inner::Replayed { .. });
        f.debug_struct("SensedBody").field("replayed", &is_replayed).finish_non_exhaustive()
    }
}
