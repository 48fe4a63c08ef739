use super::{Admission, Provider, Slot, handover};
use crate::BoxError;
use std::task::{Context, Poll, ready};
use tower_service::Service;

/// A call that waits at a gate: for its slot, and then for a clone of the service to get ready. The
/// instance that was polled ready stays with who made the call.
pub(crate) struct Waiting<S, Req> {
    pub(crate) provider: Provider,
    pub(crate) service: S,
    admission: Admission,
    slot: Option<Slot>,
    request: Option<Req>,
}

impl<S: Clone, Req> Waiting<S, Req> {
    /// Boxed: only who waits pays for it, and the future of everybody else stays small.
    pub(crate) fn new(provider: &Provider, admission: Admission, service: &S, request: Req) -> Box<Self> {
        handover::mark_queued(handover::address(provider.core()));
        Box::new(Waiting {
            provider: provider.clone(),
            service: service.clone(),
            admission,
            slot: None,
            request: Some(request),
        })
    }
}

impl<S, Req> Waiting<S, Req>
where
    S: Service<Req>,
    S::Error: Into<BoxError>,
{
    /// The request, to be called on `service` now, and the slot that it goes out on.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(Req, Slot), BoxError>> {
        loop {
            if self.slot.is_none() {
                match ready!(self.admission.poll(cx)) {
                    Ok(slot) => self.slot = Some(slot),
                    Err(refusal) => return Poll::Ready(Err(refusal.into())),
                }
            }
            match self.service.poll_ready(cx) {
                // A pause began while the service got ready: back to the queue.
                Poll::Ready(Ok(())) if self.provider.paused_since(&self.slot) => self.slot = None,
                Poll::Ready(Ok(())) => {
                    let slot = self.slot.take().expect("just granted");
                    let request = self.request.take().expect("polled after completion");
                    return Poll::Ready(Ok((request, slot)));
                }
                Poll::Ready(Err(error)) => {
                    self.slot = None;
                    return Poll::Ready(Err(error.into()));
                }
                Poll::Pending => {
                    let refusal = ready!(self.admission.poll_end(cx));
                    self.slot = None;
                    return Poll::Ready(Err(refusal.into()));
                }
            }
        }
    }
}
