use crate::BoxError;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use std::{
    any::Any,
    fmt, io,
    pin::Pin,
    task::{Context, Poll},
};

pin_project! {
    /// A response body that holds something (a slot) until its end, its error or its drop.
    pub struct HeldBody<B, G> {
        #[pin]
        body: B,
        guard: Option<G>,
    }
}

impl<B: Default, G> Default for HeldBody<B, G> {
    /// Holding nothing.
    fn default() -> Self {
        HeldBody { body: B::default(), guard: None }
    }
}

impl<B, G> HeldBody<B, G> {
    /// `body`, holding `guard`.
    #[cfg(feature = "fleet-limit")]
    #[inline]
    pub(crate) fn new(body: B, guard: Option<G>) -> Self {
        HeldBody { body, guard }
    }

    /// The body inside.
    pub fn get_ref(&self) -> &B {
        &self.body
    }
}

impl<B: fmt::Debug, G> fmt::Debug for HeldBody<B, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldBody").field("body", &self.body).field("holds", &self.guard.is_some()).finish()
    }
}

/// Something that a body holds: told apart are a call that ended and one that was cut short.
pub trait Guard {
    /// The call is over: its place is free.
    fn end(self);
}

/// `'static`, as errors are: only so can a timeout be told from a connection that broke.
fn is_timeout<E: 'static>(error: &E) -> bool {
    let error: &dyn Any = error;
    match error.downcast_ref::<BoxError>() {
        Some(error) => crate::classify::is_timeout(&**error),
        None => error.downcast_ref::<io::Error>().is_some_and(|error| crate::classify::is_timeout(error)),
    }
}

impl<B: Body, G: Guard> Body for HeldBody<B, G>
where
    B::Error: 'static,
{
    type Data = B::Data;
    type Error = B::Error;

    #[inline]
    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let mut me = self.project();
        // Returned as it is: a frame is large, and to wrap it again would move it.
        let polled = me.body.as_mut().poll_frame(cx);
        if me.guard.is_some() {
            match &polled {
                Poll::Pending => {}
                Poll::Ready(Some(Ok(_))) if !me.body.is_end_stream() => {}
                // Given up by us: it may still run there. Other errors end it.
                Poll::Ready(Some(Err(error))) if is_timeout(error) => *me.guard = None,
                Poll::Ready(_) => {
                    if let Some(guard) = me.guard.take() {
                        guard.end();
                    }
                }
            }
        }
        polled
    }

    #[inline]
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    #[inline]
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
