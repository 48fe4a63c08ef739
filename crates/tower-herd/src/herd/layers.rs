//! The layers of one rung, and when none of them has anything to say.

use super::{HerdClassify, handle::Shared, rung::Guarded};
use crate::{
    AttemptTimeoutLayer, AttemptsLayer, BreakerLayer, BudgetLayer, ClassifyLayer, FleetLimitLayer, HasTask,
    Provider, RampedReadmissionLayer, RetryAfterLayer, SettingsError, SpendLayer, Task, TokenLimitLayer,
    attempt_timeout::Timed,
    attempts::Attempts,
    breaker::{Breaker, BreakerSettings},
    budget::{AdaptiveThrottle, BudgetSettings, Throttle},
    classify::{Bodies, Classified, Options},
    fleet_limit::{FleetLimit, UntilBodyEnd},
    readmission::{Profile, RampedReadmission},
    retry_after::RetryAfter,
    spend::{Amount, Estimate, Prices, Spend},
    token_limit::{ByBytes, DeclaredTokens, TokenLimit},
    usage::{OfBody, Total, llm},
};
use std::{sync::Arc, time::Duration};
use tower_layer::Layer;

/// What one rung of a [`Herd`](super::Herd) goes by, where that is not the default: plain data, for
/// configuration files.
///
/// It belongs to the provider, for all stacks in front of it: what is left out stays as it is there.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
#[non_exhaustive]
pub struct RungSettings {
    /// When its breaker opens, and how it is probed.
    pub breaker: Option<BreakerSettings>,
    /// How its tasks come back after it was closed for long.
    pub readmission: Option<Profile>,
    /// When a share of its calls is not sent.
    pub budget: Option<BudgetSettings>,
    /// What its tokens cost, for the spend allowance of a task. Default nothing.
    pub prices: Prices,
}

impl RungSettings {
    /// All as it is.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
    /// When its breaker opens, and how it is probed.
    #[must_use]
    pub fn breaker(mut self, breaker: BreakerSettings) -> Self {
        self.breaker = Some(breaker);
        self
    }
    /// How its tasks come back after it was closed for long.
    #[must_use]
    pub fn readmission(mut self, profile: Profile) -> Self {
        self.readmission = Some(profile);
        self
    }
    /// When a share of its calls is not sent.
    #[must_use]
    pub fn budget(mut self, budget: BudgetSettings) -> Self {
        self.budget = Some(budget);
        self
    }
    /// What its tokens cost.
    #[must_use]
    pub fn prices(mut self, prices: Prices) -> Self {
        self.prices = prices;
        self
    }

    /// The field that cannot be, by its path, and why.
    pub(super) fn fault(&self) -> Option<(String, &'static str)> {
        let path = |of: &str, error: SettingsError| (format!("{of}.{}", error.field), error.why);
        let breaker = self.breaker.and_then(|breaker| breaker.check("").err());
        if let Some(error) = breaker {
            return Some(path("breaker", error));
        }
        if let Some(error) = self.readmission.and_then(|profile| profile.check("").err()) {
            return Some((error.field.replacen("ramp", "readmission", 1), error.why));
        }
        let budget = self.budget.and_then(|budget| budget.fault());
        budget.map(|(field, why)| (format!("budget.{field}"), why))
    }

    /// Gives them to the provider.
    pub(super) fn apply(&self, provider: &Provider) -> Result<(), SettingsError> {
        if let Some(breaker) = self.breaker {
            BreakerLayer::new(provider).settings(breaker)?;
        }
        if let Some(profile) = self.readmission {
            RampedReadmissionLayer::new(provider).profile(profile)?;
        }
        if let Some(budget) = self.budget {
            BudgetLayer::new(provider).settings(budget)?;
        }
        Ok(())
    }
}

/// What a call is taken to cost: its tokens, as far as they are declared or can be guessed, at the price of a
/// rung.
#[derive(Clone, Copy, Debug)]
pub struct ByPrices {
    prices: Prices,
    output: u64,
}

impl<B: http_body::Body> Estimate<http::Request<B>> for ByPrices {
    fn estimate(&self, request: &http::Request<B>) -> Amount {
        if let Some(DeclaredTokens(tokens)) = request.extensions().get() {
            // Which of them come out is not declared: the dearer way.
            return self.prices.at_most(*tokens, 0).max(self.prices.at_most(0, *tokens));
        }
        let input = ByBytes::output(0).guess(request.body().size_hint().lower());
        self.prices.at_most(input, self.output)
    }
}

/// The layers of one rung, outermost first.
#[derive(Clone)]
pub(super) struct Layers {
    pub(super) provider: Provider,
    pub(super) classify: HerdClassify,
    pub(super) shared: Arc<Shared>,
    options: Options,
    readmission: RampedReadmissionLayer,
    spend: SpendLayer<ByPrices, OfBody<Prices>, HerdClassify>,
    breaker: BreakerLayer<HerdClassify>,
    budget: BudgetLayer<HerdClassify>,
    throttle: Arc<Throttle>,
    pause: RetryAfterLayer<HerdClassify>,
    tokens: TokenLimitLayer<ByBytes, OfBody<Total>, HerdClassify>,
    limit: FleetLimitLayer<UntilBodyEnd, HerdClassify>,
    attempts: AttemptsLayer,
    sensor: ClassifyLayer<HerdClassify, Bodies>,
}

/// What they make of a service.
pub(super) type Stack<S> = RampedReadmission<
    Spend<
        Breaker<
            AdaptiveThrottle<
                RetryAfter<
                    TokenLimit<
                        FleetLimit<
                            Attempts<Classified<Timed<S, Bodies>, HerdClassify, Bodies>>,
                            UntilBodyEnd,
                            HerdClassify,
                        >,
                        ByBytes,
                        OfBody<Total>,
                        HerdClassify,
                    >,
                    HerdClassify,
                >,
                HerdClassify,
            >,
            HerdClassify,
        >,
        ByPrices,
        OfBody<Prices>,
        HerdClassify,
    >,
>;

/// What a call on the wire goes by.
#[derive(Clone, Copy)]
pub(super) struct Terms {
    pub(super) options: Options,
    pub(super) headers: Duration,
    pub(super) idle: Duration,
}

impl Layers {
    pub(super) fn new(
        provider: &Provider,
        prices: Prices,
        classify: &HerdClassify,
        shared: &Arc<Shared>,
        options: Options,
        in_ladder: bool,
    ) -> Self {
        let switch = &shared.switches;
        let pause = RetryAfterLayer::with(provider, classify.clone()).switch(&switch.pause);
        let breaker = BreakerLayer::with(provider, classify.clone());
        Layers {
            provider: provider.clone(),
            classify: classify.clone(),
            shared: shared.clone(),
            options,
            readmission: RampedReadmissionLayer::new(provider),
            spend: SpendLayer::new(provider, ByPrices { prices, output: 1024 }, llm(prices))
                .classify(classify.clone())
                .switch(&switch.spend),
            breaker: match shared.listener() {
                Some(listener) => breaker.on_alert(move |alert| listener(alert)),
                None => breaker,
            },
            throttle: provider.throttle().clone(),
            budget: BudgetLayer::with(provider, classify.clone()).switch(&switch.budget),
            // Nobody waits inside a rung of a ladder.
            pause: if in_ladder { pause.patience(Duration::ZERO) } else { pause },
            tokens: TokenLimitLayer::new(provider).classify(classify.clone()).switch(&switch.tokens),
            limit: FleetLimitLayer::with(provider, classify.clone()).switch(&switch.limit),
            attempts: AttemptsLayer::new(provider).switch(&switch.attempts),
            sensor: ClassifyLayer::new(provider)
                .classify(classify.clone())
                .options(options)
                .switch(&switch.sensor),
        }
    }

    pub(super) fn stack<S>(&self, service: S) -> Stack<S> {
        let terms = self.terms();
        let timeout =
            AttemptTimeoutLayer::new(terms.headers).idle(terms.idle).switch(&self.shared.switches.timeout);
        let sensed = self.sensor.layer(timeout.layer(service));
        let limited = self.tokens.layer(self.limit.layer(self.attempts.layer(sensed)));
        let gated = self.breaker.layer(self.budget.layer(self.pause.layer(limited)));
        self.readmission.layer(self.spend.layer(gated))
    }

    #[inline]
    pub(super) fn terms(&self) -> Terms {
        let (headers, idle) = self.shared.times();
        Terms { options: self.options, headers, idle }
    }

    /// Whether no layer has anything to say to this call but the limit, which gives it a slot.
    #[inline]
    pub(super) fn are_clear<Req: HasTask>(&self, request: &Req) -> bool {
        let provider = &self.provider;
        self.shared.is_plain()
            && provider.is_open()
            // Open, and only observed by now.
            && !provider.is_broken()
            && !provider.is_ramping()
            && !provider.limits_tokens()
            && !self.throttle.sheds()
            && request.resent().is_none()
            && request.task().is_none_or(is_plain)
    }
}

/// Neither what it spends nor what others have sent for it is to be written down.
#[inline]
fn is_plain(task: &Task) -> bool {
    task.calls_before().is_none() && task.spend_allowance().is_none()
}

impl<S> Layer<S> for Layers {
    type Service = Guarded<S>;
    fn layer(&self, inner: S) -> Guarded<S> {
        // They count from when they were first applied.
        drop(self.breaker.layer(()));
        drop(self.sensor.layer(()));
        Guarded::new(inner, self.clone())
    }
}
