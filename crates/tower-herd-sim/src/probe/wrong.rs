//! Layers that are wrong on purpose: a probe that does not catch them is no probe.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::Semaphore;
use tower_layer::Layer;
use tower_service::Service;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// Calls a clone of the ready instance, which is not ready.
    CallsClone,
    /// Asks for readiness once and lives on it.
    ReusesReadiness,
    /// Gives its one permit back at the end of a call, not when the call is dropped.
    LeaksOnDrop,
    /// Gives its one permit back only if the reply was good.
    LeaksOnError,
    /// Takes its one permit in `poll_ready` and keeps it when it is dropped uncalled.
    LeaksReadiness,
    /// Waits for readiness by waking itself, and never looks at the inner service.
    Spins,
    /// Turns an error of `poll_ready` into waiting for ever.
    HidesReadyError,
    /// Polls the inner future once more after its end.
    PollsAfterEnd,
    /// Runs the call in a task of its own and forgets that task.
    Detaches,
}

impl Wrong {
    /// All of them.
    pub const ALL: [Wrong; 9] = [
        Self::CallsClone,
        Self::ReusesReadiness,
        Self::LeaksOnDrop,
        Self::LeaksOnError,
        Self::LeaksReadiness,
        Self::Spins,
        Self::HidesReadyError,
        Self::PollsAfterEnd,
        Self::Detaches,
    ];
}

/// A layer with one mistake.
#[derive(Clone, Debug)]
pub struct WrongLayer {
    wrong: Wrong,
    permits: Arc<Semaphore>,
}

impl WrongLayer {
    /// The mistake to make.
    pub fn new(wrong: Wrong) -> Self {
        Self { wrong, permits: Arc::new(Semaphore::new(1)) }
    }

    /// Whether the permit is back.
    pub fn quiescent(&self) -> bool {
        self.permits.available_permits() == 1
    }
}

impl<S> Layer<S> for WrongLayer {
    type Service = WrongService<S>;

    fn layer(&self, inner: S) -> WrongService<S> {
        WrongService { inner, wrong: self.wrong, permits: self.permits.clone(), asked: false }
    }
}

/// The service of a [`WrongLayer`].
pub struct WrongService<S> {
    inner: S,
    wrong: Wrong,
    permits: Arc<Semaphore>,
    asked: bool,
}

impl<S> fmt::Debug for WrongService<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WrongService").field("wrong", &self.wrong).finish_non_exhaustive()
    }
}

impl<S: Clone> Clone for WrongService<S> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), wrong: self.wrong, permits: self.permits.clone(), asked: false }
    }
}

type Boxed<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;

impl<S, R> Service<R> for WrongService<S>
where
    S: Service<R> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Response: Send,
    S::Error: Send,
    R: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Boxed<S::Response, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        match self.wrong {
            Wrong::ReusesReadiness if self.asked => Poll::Ready(Ok(())),
            Wrong::Spins => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Wrong::HidesReadyError => match self.inner.poll_ready(cx) {
                Poll::Ready(Err(_)) => Poll::Pending,
                other => other,
            },
            Wrong::LeaksReadiness if !self.asked => {
                let Ok(permit) = self.permits.try_acquire() else {
                    // Nobody will wake it: the permit never returns.
                    return Poll::Pending;
                };
                permit.forget();
                self.asked = true;
                self.inner.poll_ready(cx)
            }
            _ => {
                self.asked = true;
                self.inner.poll_ready(cx)
            }
        }
    }

    fn call(&mut self, request: R) -> Self::Future {
        let permits = self.permits.clone();
        match self.wrong {
            Wrong::CallsClone => Box::pin(self.inner.clone().call(request)),
            Wrong::ReusesReadiness | Wrong::HidesReadyError | Wrong::Spins => {
                Box::pin(self.inner.call(request))
            }
            Wrong::LeaksReadiness => {
                self.asked = false;
                let call = self.inner.call(request);
                Box::pin(async move {
                    let reply = call.await;
                    permits.add_permits(1);
                    reply
                })
            }
            Wrong::LeaksOnDrop | Wrong::LeaksOnError => {
                let call = self.inner.call(request);
                let always = self.wrong == Wrong::LeaksOnDrop;
                Box::pin(async move {
                    let permit = permits.acquire().await;
                    if always {
                        permit.into_iter().for_each(tokio::sync::SemaphorePermit::forget);
                        let reply = call.await;
                        permits.add_permits(1);
                        return reply;
                    }
                    let reply = call.await;
                    if reply.is_err() {
                        permit.into_iter().for_each(tokio::sync::SemaphorePermit::forget);
                    }
                    reply
                })
            }
            Wrong::PollsAfterEnd => {
                let call = self.inner.call(request);
                Box::pin(async move {
                    let mut call = pin!(call);
                    let reply = poll_fn(|cx| call.as_mut().poll(cx)).await;
                    poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx).is_ready())).await;
                    reply
                })
            }
            Wrong::Detaches => {
                let call = self.inner.call(request);
                Box::pin(async move {
                    let (send, receive) = tokio::sync::oneshot::channel();
                    tokio::spawn(async move {
                        let mut call = Box::pin(call);
                        let reply = call.as_mut().await;
                        // A connection that is never closed: the work outlives its caller.
                        if send.is_closed() {
                            std::future::pending::<()>().await;
                        }
                        drop(send.send(reply));
                    });
                    match receive.await {
                        Ok(reply) => reply,
                        Err(_) => std::future::pending().await,
                    }
                })
            }
        }
    }
}
