use super::{EstimateTokens, ResponseFuture, TokenEstimate, TokenLimitLayer, TokenReserve, future};
use crate::{
    BoxError, Classify, HasTask, Mode, RefusalKind,
    provider::{Booked, TokenWait, Unbooked, WaitFor, handover},
    usage::Meter,
};
use std::{
    fmt,
    task::{Context, Poll},
    time::Duration,
};
use tower_service::Service;

/// The service of [`TokenLimitLayer`].
#[derive(Clone)]
pub struct TokenLimit<S, E, M, C> {
    pub(super) inner: S,
    pub(super) rules: TokenLimitLayer<E, M, C>,
}

impl<S: fmt::Debug, E, M, C> fmt::Debug for TokenLimit<S, E, M, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenLimit").field("inner", &self.inner).field("rules", &self.rules).finish()
    }
}

impl<S, Req, E, M, C> Service<Req> for TokenLimit<S, E, M, C>
where
    S: Service<Req> + Clone,
    S::Error: Into<BoxError>,
    Req: HasTask,
    E: EstimateTokens<Req>,
    M: Meter<S::Response, Unit = u64> + Clone,
    C: Classify<S::Response> + Clone,
{
    type Response = M::Metered<TokenReserve>;
    type Error = BoxError;
    type Future = ResponseFuture<S, Req, M, C>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    #[inline]
    fn call(&mut self, request: Req) -> Self::Future {
        let rules = &self.rules;
        let (meter, classify) = (rules.meter.clone(), rules.classify.clone());
        let mode = rules.switch.mode();
        if !rules.provider.limits_tokens() || mode == Mode::Off {
            return future::call(&mut self.inner, request, None, meter, classify);
        }
        let (mut cost, is_guess) = match rules.estimate.tokens(&request) {
            TokenEstimate::Declared(tokens) => (tokens, false),
            TokenEstimate::Guess(tokens) => (tokens, true),
        };
        match rules.provider.try_book(&mut cost, is_guess) {
            Ok(booked) => future::call(&mut self.inner, request, Some(booked), meter, classify),
            Err(why) if mode == Mode::Observe => {
                let booked = rules.observed(&request, cost, &why);
                future::call(&mut self.inner, request, booked, meter, classify)
            }
            Err(Unbooked::TooLarge) => future::refused(rules.provider.too_large(), meter, classify),
            Err(Unbooked::NotYet) => self.waiting(request, cost, meter, classify),
        }
    }
}

impl<S, E, M, C> TokenLimit<S, E, M, C> {
    #[cold]
    #[inline(never)]
    fn waiting<Req>(&self, request: Req, cost: u64, meter: M, classify: C) -> ResponseFuture<S, Req, M, C>
    where
        S: Service<Req> + Clone,
        Req: HasTask,
    {
        let provider = &self.rules.provider;
        let now = provider.clock().now();
        let wait = self.rules.wait(&request, now);
        // Once it is let through, this call will be watched below: whoever asks may rely on it.
        handover::mark_sensed(provider.core());
        let waiting = match wait.until <= now {
            true => Err(provider.no_tokens(now, cost, &wait)),
            false => TokenWait::begin(provider, wait, now, cost, &self.inner, request),
        };
        match waiting {
            Ok(waiting) => future::waiting(waiting, meter, classify),
            Err(refusal) => future::refused(refusal, meter, classify),
        }
    }
}

impl<E, M, C> TokenLimitLayer<E, M, C> {
    fn wait<Req: HasTask>(&self, request: &Req, now: crate::Time) -> WaitFor {
        let patience = if handover::is_impatient() { Some(Duration::ZERO) } else { self.patience };
        WaitFor::of(request, patience, self.provider.core(), now)
    }

    /// What would have been done with a call that may pass all the same.
    #[cold]
    fn observed<Req: HasTask>(&self, request: &Req, cost: u64, why: &Unbooked) -> Option<Booked> {
        let provider = &self.provider;
        let kind = match why {
            Unbooked::TooLarge => RefusalKind::TooLarge,
            Unbooked::NotYet => RefusalKind::Tokens,
        };
        provider.would_refuse(&self.switch, kind);
        if kind == RefusalKind::TooLarge {
            return None;
        }
        let now = provider.clock().now();
        provider.book_anyway(cost, &self.wait(request, now), now)
    }
}
