//! Every layer keeps the `Service` contract, alone and in stacks: see `tower_herd_sim::probe`.
//!
//! After each trial nothing may be held any more: no slot, no place in a queue, no sleeper.

use http_body_util::Full;
use std::{
    convert::Infallible,
    error::Error,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tower::{
    ServiceBuilder,
    layer::{layer_fn, util::Identity},
};
use tower_herd::{
    AttemptTimeoutLayer, AttemptsLayer, BreakerLayer, BudgetLayer, ClassifyLayer, Fleet, FleetLimitLayer,
    HashedFailover, HashedFailoverLayer, Herd, IncomingAttemptsLayer, JitteredRetryLayer, Mode, Provider,
    ProviderSettings, RampedReadmissionLayer, RetryAfterLayer, Signal, SpendLayer, Switch, TaskLayer,
    TokenLimitLayer, ToolCallsLayer, classify_fn,
    failover::Rung,
    herd::RungSettings,
    retry_token::{
        Claim, HolderId, JobBreakerLayer, LocalTokens, RetryTokenLayer, RetryTokens, Schedule, Token, Tokens,
    },
    spend::{Allowance, Amount, Prices},
    tool_calls::Call,
    usage::{llm, of_reply},
};
use tower_herd_sim::probe::{Contract, ProbeService, UnderTest};

type Request = http::Request<Full<bytes::Bytes>>;

/// Two slots, so that eight calls at once must wait.
fn providers<const N: usize>() -> [Provider; N] {
    let fleet = Fleet::local();
    std::array::from_fn(|i| {
        fleet.configure(&format!("rung-{i}"), ProviderSettings::new().ceiling(2)).unwrap()
    })
}

fn idle<const N: usize>(providers: &[Provider; N]) -> impl Fn() -> bool + 'static {
    let providers = providers.clone();
    move || providers.iter().all(|provider| provider.in_flight() == 0 && provider.waiting() == 0)
}

/// For the probe's plain replies.
fn plain(outcome: Result<&u64, &(dyn Error + 'static)>) -> Signal {
    match outcome {
        Ok(_) => Signal::new(tower_herd::Kind::Success),
        Err(error) => tower_herd::classify::signal_of_error(error),
    }
}

/// The layers of one rung, as the documentation has them. A macro, since each use has another inner
/// service.
macro_rules! rung {
    ($provider:expr) => {
        ServiceBuilder::new()
            .layer(BreakerLayer::new($provider))
            .layer(RampedReadmissionLayer::new($provider))
            .layer(BudgetLayer::new($provider))
            .layer(RetryAfterLayer::new($provider))
            .layer(FleetLimitLayer::new($provider))
            .layer(AttemptsLayer::new($provider))
            .layer(ClassifyLayer::new($provider))
            .layer(AttemptTimeoutLayer::default())
            .into_inner()
    };
}

#[tokio::test(start_paused = true)]
async fn task() {
    Contract::new(|| UnderTest::new(TaskLayer::new())).check_http().await.assert_kept();
    Contract::new(|| UnderTest::new(TaskLayer::new())).check_plain().await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn classify_of_http_replies() {
    let make = || {
        let all = providers::<1>();
        UnderTest::new(ClassifyLayer::new(&all[0]).read_success(64)).quiescent(idle(&all))
    };
    Contract::new(make).check_http().await.assert_kept();
    let make = || UnderTest::new(ClassifyLayer::new(&providers::<1>()[0]));
    Contract::new(make).check_http().await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn classify_of_any_replies() {
    let make = || UnderTest::new(ClassifyLayer::new(&providers::<1>()[0]).replies());
    Contract::new(make).check_http().await.assert_kept();
    let make = || {
        let classify = classify_fn(plain as fn(Result<&u64, &(dyn Error + 'static)>) -> Signal);
        UnderTest::new(ClassifyLayer::new(&providers::<1>()[0]).classify(classify).replies())
    };
    Contract::new(make).check_plain().await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn attempt_timeout() {
    // Shorter and longer than what the probe's replies take.
    for headers in [Duration::from_millis(5), Duration::from_secs(30)] {
        let make = || UnderTest::new(AttemptTimeoutLayer::new(headers).idle(headers));
        Contract::new(make).check_http().await.assert_kept();
        let make = || UnderTest::new(AttemptTimeoutLayer::new(headers).replies());
        Contract::new(make).check_plain().await.assert_kept();
    }
}

#[tokio::test(start_paused = true)]
async fn attempts() {
    let make = || UnderTest::new(AttemptsLayer::new(&providers::<1>()[0]).tell_first(true));
    Contract::new(make).check_http().await.assert_kept();
    Contract::new(|| UnderTest::new(IncomingAttemptsLayer::new())).check_http().await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn retry_after() {
    let make = || {
        let all = providers::<1>();
        UnderTest::new(RetryAfterLayer::new(&all[0])).quiescent(idle(&all))
    };
    Contract::new(make).check_http().await.assert_kept();
    let make = || {
        let all = providers::<1>();
        let layer = RetryAfterLayer::with(&all[0], classify_fn(plain)).patience(Duration::from_millis(500));
        UnderTest::new(layer).quiescent(idle(&all))
    };
    Contract::new(make).check_plain().await.assert_kept();
}

/// Closed; and open while it is only observed, so that the calls that stand for its probes are among those of
/// the contract.
#[tokio::test(start_paused = true)]
async fn breaker() {
    for mode in [Mode::Enforce, Mode::Observe] {
        let tripped = |all: &[Provider; 1]| {
            let layer = BreakerLayer::new(&all[0]).strict().unwrap().switch(&Switch::new(mode));
            if mode == Mode::Observe {
                layer.handle().force_open();
            }
            layer
        };
        let make = || {
            let all = providers::<1>();
            UnderTest::new(tripped(&all)).quiescent(idle(&all))
        };
        Contract::new(make).check_http().await.assert_kept();
        let make = || {
            let all = providers::<1>();
            UnderTest::new(tripped(&all).classify(classify_fn(plain))).quiescent(idle(&all))
        };
        Contract::new(make).check_plain().await.assert_kept();
    }
}

#[tokio::test(start_paused = true)]
async fn tool_calls() {
    let make = || {
        let call = |request: &Request| Some(Call::new(request.uri().path(), "{}", "step"));
        let layer = ToolCallsLayer::new(&providers::<1>()[0], call);
        UnderTest::new(ServiceBuilder::new().layer(TaskLayer::new()).layer(layer).into_inner())
    };
    Contract::new(make).check_http().await.assert_kept();
    let make = || {
        let call = |request: &u64| Some(Call::new("tool", &request.to_string(), "step"));
        let layer = ToolCallsLayer::new(&providers::<1>()[0], call).classify(classify_fn(plain));
        UnderTest::new(layer)
    };
    Contract::new(make).check_plain().await.assert_kept();
}

/// A store of tokens that is asked over a network, as far as a layer can tell.
#[derive(Clone)]
struct Remote(LocalTokens);

impl Remote {
    async fn far<A>(&self, answer: impl Future<Output = Result<A, Infallible>>) -> Result<A, Infallible> {
        tokio::time::sleep(Duration::from_millis(5)).await;
        answer.await
    }
}

impl RetryTokens for Remote {
    type Error = Infallible;
    async fn claim(&self, key: &str, schedule: &Schedule) -> Result<Claim, Infallible> {
        self.far(self.0.claim(key, schedule)).await
    }
    async fn extend(&self, key: &str, holder: HolderId, at_least: Duration) -> Result<bool, Infallible> {
        self.far(self.0.extend(key, holder, at_least)).await
    }
    async fn clear(&self, key: &str, holder: HolderId) -> Result<bool, Infallible> {
        self.far(self.0.clear(key, holder)).await
    }
    async fn peek(&self, key: &str) -> Result<Option<Token>, Infallible> {
        self.far(self.0.peek(key)).await
    }
    async fn sweep(&self, idle: Duration, limit: u32) -> Result<u64, Infallible> {
        self.far(self.0.sweep(idle, limit)).await
    }
}

/// Each call a job of its own, all calls one job, and calls that are no jobs.
async fn retry_tokens_of<T: RetryTokens>(store: impl Fn() -> T) {
    for jobs in [u64::MAX, 1, 0] {
        let make = || {
            let (tokens, calls) = (Tokens::new("jobs", store()), Arc::new(AtomicU64::new(0)));
            let key = move |_: &u64| {
                let call = calls.fetch_add(1, Ordering::Relaxed);
                call.checked_rem(jobs).map(|job| job.to_string())
            };
            // Held, so that the heart beats too.
            let schedule = Schedule::new().hold(Some(Duration::from_millis(100))).unwrap();
            let layer = RetryTokenLayer::new(&tokens, key, |_: &u64| 1).schedule(schedule);
            UnderTest::new(layer).quiescent(move || tokens.counts().running == 0)
        };
        Contract::new(make).check_plain().await.assert_kept();
        let make = || {
            let layer = RetryTokenLayer::new(
                &Tokens::new("jobs", store()),
                move |request: &Request| (jobs > 0).then(|| request.uri().path().to_owned()),
                |_: &Request| 2,
            );
            UnderTest::new(layer)
        };
        Contract::new(make).check_http().await.assert_kept();
    }
}

#[tokio::test(start_paused = true)]
async fn retry_token() {
    retry_tokens_of(LocalTokens::new).await;
    retry_tokens_of(|| Remote(LocalTokens::new())).await;
}

async fn job_breaker_of<T: RetryTokens>(store: impl Fn() -> T) {
    let make = || {
        let layer = JobBreakerLayer::new(&Tokens::new("jobs", store()), |_: &u64| Some("crm"));
        UnderTest::new(layer)
    };
    Contract::new(make).check_plain().await.assert_kept();
    let make = || {
        let tokens = Tokens::new("jobs", store());
        let breaker = JobBreakerLayer::new(&tokens, |_: &Request| Some("crm"));
        let token = RetryTokenLayer::new(
            &tokens,
            |request: &Request| Some(request.uri().to_string()),
            |_: &Request| 1,
        );
        UnderTest::new(ServiceBuilder::new().layer(breaker).layer(token).into_inner())
    };
    Contract::new(make).check_http().await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn job_breaker() {
    job_breaker_of(LocalTokens::new).await;
    job_breaker_of(|| Remote(LocalTokens::new())).await;
}

#[tokio::test(start_paused = true)]
async fn classify_that_holds_streams_back() {
    let make = || {
        let all = providers::<1>();
        let layer = ClassifyLayer::new(&all[0]).hold_until_content(Duration::from_secs(5));
        UnderTest::new(layer).quiescent(idle(&all))
    };
    Contract::new(make).check_http().await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn fleet_limit_until_the_body_ends() {
    let make = || {
        let all = providers::<1>();
        UnderTest::new(FleetLimitLayer::new(&all[0])).quiescent(idle(&all))
    };
    Contract::new(make).check_http().await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn fleet_limit_until_the_reply() {
    let make = || {
        let all = providers::<1>();
        UnderTest::new(FleetLimitLayer::new(&all[0]).until_reply()).quiescent(idle(&all))
    };
    Contract::new(make).check_http().await.assert_kept();
    let make = || {
        let all = providers::<1>();
        let layer = FleetLimitLayer::with(&all[0], classify_fn(plain)).until_reply();
        UnderTest::new(layer.patience(Duration::from_millis(5))).quiescent(idle(&all))
    };
    Contract::new(make).check_plain().await.assert_kept();
}

/// A limit of so many tokens a second; each call of the probe takes one.
fn tokens_per_second(tokens: u32) -> [Provider; 1] {
    let settings = ProviderSettings::new().ceiling(2).tokens_per_minute(60 * tokens).token_burst(4);
    [Fleet::local().configure("tokens", settings).unwrap()]
}

fn no_line(providers: &[Provider; 1]) -> impl Fn() -> bool + 'static {
    let (idle, [provider]) = (idle(providers), providers.clone());
    move || idle() && provider.waiting_for_tokens() == 0
}

#[tokio::test(start_paused = true)]
async fn token_limit() {
    // Unlimited; enough for everybody; and so few that half of the calls wait.
    let make = || UnderTest::new(TokenLimitLayer::new(&providers::<1>()[0]));
    Contract::new(make).check_http().await.assert_kept();
    for per_second in [2, 1_000_000] {
        let make = || {
            let all = tokens_per_second(per_second);
            UnderTest::new(TokenLimitLayer::new(&all[0]).estimate(|_: &Request| 1_u64))
                .quiescent(no_line(&all))
        };
        Contract::new(make).check_http().await.assert_kept();
        let make = || {
            let all = tokens_per_second(per_second);
            let used = of_reply(|_: &u64| Some(1_u64));
            let layer = TokenLimitLayer::with(&all[0], |_: &u64| 1_u64, used).classify(classify_fn(plain));
            UnderTest::new(layer).quiescent(no_line(&all))
        };
        Contract::new(make).check_plain().await.assert_kept();
    }
}

#[tokio::test(start_paused = true)]
async fn spend() {
    let prices = Prices::new(Amount::units(1), Amount::units(1));
    let make = || {
        let month = Allowance::new(Amount::units(1_000));
        let cost = |_: &Request| Amount::units(1);
        UnderTest::new(SpendLayer::new(&providers::<1>()[0], cost, llm(prices)).within(&month))
    };
    Contract::new(make).check_http().await.assert_kept();
    let make = || {
        let month = Allowance::new(Amount::units(1_000));
        let cost = |_: &u64| Amount::units(1);
        let layer = SpendLayer::new(&providers::<1>()[0], cost, of_reply(|_: &u64| None::<Amount>));
        UnderTest::new(layer.within(&month).classify(classify_fn(plain)))
    };
    Contract::new(make).check_plain().await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn spend_and_tokens_in_the_stack_of_one_provider() {
    let make = || {
        let all = tokens_per_second(3);
        let prices = Prices::new(Amount::units(1), Amount::units(1));
        let month = Allowance::new(Amount::units(1_000));
        let cost = |_: &Request| Amount::units(1);
        let stack = ServiceBuilder::new()
            .layer(TaskLayer::new())
            .layer(JitteredRetryLayer::new())
            .layer(SpendLayer::new(&all[0], cost, llm(prices)).within(&month))
            .layer(RetryAfterLayer::new(&all[0]))
            .layer(TokenLimitLayer::new(&all[0]).estimate(|_: &Request| 1_u64))
            .layer(FleetLimitLayer::new(&all[0]))
            .layer(ClassifyLayer::new(&all[0]))
            .layer(AttemptTimeoutLayer::default())
            .into_inner();
        UnderTest::new(stack).quiescent(no_line(&all))
    };
    Contract::new(make).check_http().await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn budget() {
    let make = || {
        let all = providers::<1>();
        UnderTest::new(BudgetLayer::new(&all[0])).quiescent(idle(&all))
    };
    Contract::new(make).check_http().await.assert_kept();
    let make = || UnderTest::new(BudgetLayer::new(&providers::<1>()[0]).classify(classify_fn(plain)));
    Contract::new(make).check_plain().await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn jittered_retry() {
    let make = || {
        let layer = JitteredRetryLayer::new();
        let asked = layer.clone();
        UnderTest::new(layer).quiescent(move || asked.sleeping() == 0)
    };
    Contract::new(make).check_http().await.assert_kept();
    let make = || UnderTest::new(JitteredRetryLayer::new().classify(classify_fn(plain)));
    Contract::new(make).check_plain().await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn ramped_readmission() {
    // Open, and closed for so long that all but a few are refused.
    for pause in [Duration::ZERO, Duration::from_secs(3600)] {
        let make = || {
            let all = providers::<1>();
            all[0].pause_for(pause);
            UnderTest::new(RampedReadmissionLayer::new(&all[0])).quiescent(idle(&all))
        };
        Contract::new(make).check_http().await.assert_kept();
        Contract::new(make).check_plain().await.assert_kept();
    }
}

#[tokio::test(start_paused = true)]
async fn hashed_failover_layer() {
    let make = || {
        let all = providers::<3>();
        let [a, b, c] = &all;
        let rungs = [
            Rung::<_, Request>::new(a, Identity::new()),
            Rung::new(b, Identity::new()),
            Rung::new(c, Identity::new()).tier(1).paid(),
        ];
        UnderTest::new(HashedFailoverLayer::new(rungs).unwrap()).quiescent(idle(&all))
    };
    Contract::new(make).check_http().await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn hashed_failover_over_layers_and_over_services() {
    let make = || {
        let all = providers::<2>();
        let [a, b] = &all;
        let rungs = [Rung::<_, Request>::new(a, rung!(a)), Rung::new(b, rung!(b)).tier(1)];
        UnderTest::new(HashedFailoverLayer::new(rungs).unwrap()).quiescent(idle(&all))
    };
    Contract::new(make).check_http().await.assert_kept();
    let make = || {
        let all = providers::<2>();
        let [a, b] = all.clone();
        let layer = layer_fn(move |service: ProbeService| {
            let rungs = [Rung::<_, Request>::new(&a, service.clone()), Rung::new(&b, service).tier(1)];
            HashedFailover::new(rungs).unwrap()
        });
        UnderTest::new(layer).quiescent(idle(&all))
    };
    Contract::new(make).check_http().await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn the_stack_of_one_provider() {
    let make = || {
        let all = providers::<1>();
        let retry = JitteredRetryLayer::new();
        let (asked, idle) = (retry.clone(), idle(&all));
        let stack =
            ServiceBuilder::new().layer(TaskLayer::new()).layer(retry).layer(rung!(&all[0])).into_inner();
        UnderTest::new(stack).quiescent(move || idle() && asked.sleeping() == 0)
    };
    Contract::new(make).check_http().await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn the_whole_stack() {
    let make = || {
        let all = providers::<3>();
        let [a, b, c] = &all;
        let rungs = [
            Rung::<_, Request>::new(a, rung!(a)),
            Rung::new(b, rung!(b)).weight(0.5),
            Rung::new(c, rung!(c)).tier(1).paid(),
        ];
        let retry = JitteredRetryLayer::new();
        let (asked, idle) = (retry.clone(), idle(&all));
        let stack = ServiceBuilder::new()
            .layer(TaskLayer::new())
            .layer(retry)
            .layer(HashedFailoverLayer::new(rungs).unwrap())
            .into_inner();
        UnderTest::new(stack).quiescent(move || idle() && asked.sleeping() == 0)
    };
    Contract::new(make).check_http().await.assert_kept();
}

/// The whole stack from one builder, by its short way and by the layers' way.
#[tokio::test(start_paused = true)]
async fn herd() {
    let make = || {
        let all = providers::<1>();
        UnderTest::new(Herd::new(&all[0])).quiescent(idle(&all))
    };
    Contract::new(make).check_http().await.assert_kept();
    let make = || {
        let all = providers::<1>();
        let herd = Herd::new(&all[0]);
        herd.handle().set_all(Mode::Observe);
        UnderTest::new(herd).quiescent(idle(&all))
    };
    Contract::new(make).check_http().await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn herd_of_a_ladder() {
    let make = || {
        let all = providers::<2>();
        let rungs = all.each_ref().map(|provider| Rung::<_, Request>::new(provider, RungSettings::new()));
        UnderTest::new(Herd::ladder(rungs).unwrap()).quiescent(idle(&all))
    };
    Contract::new(make).check_http().await.assert_kept();
}
