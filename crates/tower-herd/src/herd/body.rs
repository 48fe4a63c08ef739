use super::{handle::Flight, wire::OnWire};
use crate::{
    BoxError, Kind, Signal,
    attempt_timeout::{AttemptTimeout, Phase, TimedBody},
    body::HeldBody,
    classify::{SensedBody, is_timeout},
    fleet_limit::Held,
    http::grpc,
    spend::{Charge, Prices},
    task::far,
    token_limit::TokenReserve,
    usage::{MeteredBody, Total},
};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::{Instant, Sleep, sleep_until};

/// What the limit, the sensor and the attempt timeout wrap around a body.
pub(super) type HeldOf<B> = HeldBody<SensedBody<TimedBody<B>>, Held>;

/// What all layers of a rung do.
pub(super) type Nest<B> = MeteredBody<MeteredBody<HeldOf<B>, Total, TokenReserve>, Prices, Charge>;

pin_project! {
    /// The body of a reply that came through a [`Herd`](super::Herd).
    ///
    /// It holds the call's slot until its end, tells the provider how it ended, and fails when nothing
    /// comes for too long ([`AttemptTimeout`]). Frames, trailers and the size hint are those of the body
    /// inside.
    pub struct HerdBody<B>
    where
        B: Body,
        B::Error: Into<BoxError>,
    {
        #[pin]
        inner: Inner<B>,
        // Under way until it ends.
        flight: Option<Flight>,
    }
}

pin_project! {
    #[project = InnerProj]
    enum Inner<B>
    where
        B: Body,
        B::Error: Into<BoxError>,
    {
        // Of a plain success: what the three do, in one.
        Direct {
            #[pin]
            body: B,
            wire: Option<OnWire>,
            idle: Duration,
            wait: Option<Pin<Box<Wait>>>,
            is_over: bool,
        },
        // As the layers have left it. Boxed: most replies are moved without one.
        Held { held: Pin<Box<HeldOf<B>>> },
        Nest { nest: Pin<Box<Nest<B>>> },
    }
}

impl<B: Body> Inner<B>
where
    B::Error: Into<BoxError>,
{
    #[inline]
    fn is_end_stream(&self) -> bool {
        match self {
            Inner::Direct { body, is_over, .. } => *is_over || body.is_end_stream(),
            Inner::Held { held } => held.is_end_stream(),
            Inner::Nest { nest } => nest.is_end_stream(),
        }
    }
}

pin_project! {
    // Of a body that somebody waits for.
    struct Wait {
        #[pin]
        sleep: Sleep,
        // When the silence began, while it lasts.
        since: Option<Instant>,
    }
}

impl<B: Body> HerdBody<B>
where
    B::Error: Into<BoxError>,
{
    pub(super) fn nest(nest: Nest<B>) -> Self {
        HerdBody { inner: Inner::Nest { nest: Box::pin(nest) }, flight: None }
    }

    pub(super) fn held(held: HeldOf<B>) -> Self {
        HerdBody { inner: Inner::Held { held: Box::pin(held) }, flight: None }
    }

    /// Keeps the call under way until the body has ended, or is dropped.
    #[inline]
    pub(super) fn keep(&mut self, flight: Option<Flight>) {
        if !self.is_end_stream() {
            self.flight = flight;
        }
    }

    /// `wire`, `flight`: none, if it has no body.
    #[inline(always)]
    pub(super) fn direct(body: B, wire: Option<OnWire>, idle: Duration, flight: Option<Flight>) -> Self {
        HerdBody { inner: Inner::Direct { body, wire, idle, wait: None, is_over: false }, flight }
    }
}

impl<B: Body + Default> Default for HerdBody<B>
where
    B::Error: Into<BoxError>,
{
    fn default() -> Self {
        Self::direct(B::default(), None, Duration::MAX, None)
    }
}

impl<B> Body for HerdBody<B>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    type Data = B::Data;
    type Error = BoxError;

    #[inline]
    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
        let mut me = self.project();
        let polled = match me.inner.as_mut().project() {
            InnerProj::Direct { mut body, wire, idle, wait, is_over } => {
                if *is_over {
                    return Poll::Ready(None);
                }
                let frame = match body.as_mut().poll_frame(cx) {
                    Poll::Ready(frame) => frame,
                    Poll::Pending => {
                        ready!(silent(wait, *idle, cx));
                        *is_over = true;
                        *me.flight = None;
                        // Given up by us: it may still run there.
                        if let Some(open) = wire {
                            open.give_up();
                        }
                        *wire = None;
                        let error = AttemptTimeout { phase: Phase::Idle, after: *idle };
                        return Poll::Ready(Some(Err(error.into())));
                    }
                };
                if let Some(wait) = wait {
                    *wait.as_mut().project().since = None;
                }
                let frame = frame.map(|frame| frame.map_err(Into::into));
                if (wire.is_some() || me.flight.is_some())
                    && (body.is_end_stream() || !frame.as_ref().is_some_and(is_data))
                {
                    settle(wire, frame.as_ref());
                    *me.flight = None;
                }
                return Poll::Ready(frame);
            }
            InnerProj::Held { held } => held.as_mut().poll_frame(cx),
            InnerProj::Nest { nest } => nest.as_mut().poll_frame(cx),
        };
        if let Poll::Ready(frame) = &polled
            && me.flight.is_some()
            && (me.inner.is_end_stream() || !frame.as_ref().is_some_and(is_data))
        {
            *me.flight = None;
        }
        polled
    }

    #[inline]
    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    #[inline]
    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Direct { body, .. } => body.size_hint(),
            Inner::Held { held } => held.size_hint(),
            Inner::Nest { nest } => nest.size_hint(),
        }
    }
}

fn is_data<D>(frame: &Result<Frame<D>, BoxError>) -> bool {
    frame.as_ref().is_ok_and(Frame::is_data)
}

/// The body ends with this frame.
fn settle<D>(wire: &mut Option<OnWire>, frame: Option<&Result<Frame<D>, BoxError>>) {
    if let Some(open) = wire {
        match frame {
            Some(Err(error)) if is_timeout(&**error) => open.give_up(),
            Some(Err(_)) => open.end(Some(&Signal::new(Kind::Failed))),
            Some(Ok(frame)) => open.end(frame.trailers_ref().and_then(grpc::trailers).as_ref()),
            None => open.end(None),
        }
    }
    *wire = None;
}

/// Whether the body has been silent for too long.
#[cold]
fn silent(wait: &mut Option<Pin<Box<Wait>>>, idle: Duration, cx: &mut Context<'_>) -> Poll<()> {
    let now = Instant::now();
    let wait = wait.get_or_insert_with(|| Box::pin(Wait { sleep: sleep_until(far(idle)), since: None }));
    let mut wait = wait.as_mut().project();
    let since = *wait.since.get_or_insert(now);
    let at = since.checked_add(idle).unwrap_or_else(|| far(idle));
    loop {
        ready!(wait.sleep.as_mut().poll(cx));
        if wait.sleep.deadline() >= at {
            return Poll::Ready(());
        }
        // It was armed for an earlier silence that ended in time.
        wait.sleep.as_mut().reset(at);
    }
}

impl<B: Body> fmt::Debug for HerdBody<B>
where
    B::Error: Into<BoxError>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_direct = matches!(&self.inner, Inner::Direct { .. });
        f.debug_struct("HerdBody").field("direct", &is_direct).finish_non_exhaustive()
    }
}
