use super::{Amount, Estimate, ResponseFuture, SpendLayer, charge::Charge, future};
use crate::{BoxError, Classify, HasTask, Mode, Refusal, RefusalKind, Task, usage::Meter};
use std::{
    fmt,
    task::{Context, Poll},
};
use tower_service::Service;

/// The service of [`SpendLayer`].
#[derive(Clone)]
pub struct Spend<S, E, M, C> {
    pub(super) inner: S,
    pub(super) rules: SpendLayer<E, M, C>,
}

impl<S: fmt::Debug, E, M, C> fmt::Debug for Spend<S, E, M, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spend").field("inner", &self.inner).field("rules", &self.rules).finish()
    }
}

impl<S, Req, E, M, C> Service<Req> for Spend<S, E, M, C>
where
    S: Service<Req>,
    S::Error: Into<BoxError>,
    Req: HasTask,
    E: Estimate<Req>,
    M: Meter<S::Response, Unit = Amount> + Clone,
    C: Classify<S::Response> + Clone,
{
    type Response = M::Metered<Charge>;
    type Error = BoxError;
    type Future = ResponseFuture<S::Future, M, C>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    #[inline]
    fn call(&mut self, request: Req) -> Self::Future {
        let rules = &self.rules;
        let (meter, classify) = (rules.meter.clone(), rules.classify.clone());
        match rules.charge(&request) {
            Ok(charge) => future::call(&mut self.inner, request, charge, meter, classify),
            Err(refusal) => future::refused(refusal, meter, classify),
        }
    }
}

impl<E, M, C> SpendLayer<E, M, C> {
    /// What is charged for the request; none if nothing limits what it costs.
    #[inline]
    fn charge<Req: HasTask>(&self, request: &Req) -> Result<Option<Charge>, Refusal>
    where
        E: Estimate<Req>,
    {
        let task = request.task();
        let is_limited = self.within.is_some()
            || task.is_some_and(|task| self.per_task.is_some() || task.spend_allowance().is_some());
        let mode = self.switch.mode();
        if !is_limited || mode == Mode::Off {
            return Ok(None);
        }
        match self.reserve(task, self.estimate.estimate(request)) {
            Ok(charge) => Ok(Some(charge)),
            Err(_) if mode == Mode::Observe => {
                self.provider.would_refuse(&self.switch, RefusalKind::Spend);
                Ok(None)
            }
            Err(why) => Err(self.provider.refuse(RefusalKind::Spend, why, None)),
        }
    }

    fn reserve(&self, task: Option<&Task>, amount: Amount) -> Result<Charge, &'static str> {
        let share = self.per_task.zip(task).map(|(here, task)| task.spend_share(here.layer, here.limit));
        let from = [
            (task.and_then(Task::spend_allowance), "what its task may spend is used up"),
            (share.as_ref(), "what its task may spend here is used up"),
            (self.within.as_ref(), "what may be spent here is used up"),
        ];
        Charge::reserve(&self.provider, from, amount)
    }
}
