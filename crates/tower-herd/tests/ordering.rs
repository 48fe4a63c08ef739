//! The order of the stack: each pair of layers in both orders. As documented it behaves; swapped, it shows what the
//! table of `guide::order` says that breaks.

mod common;

use common::{Boxed, Request, Response, Script, answer, ms, request, rung, secs, until};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, Service, ServiceExt};
use tower_herd::{
    AttemptTimeoutLayer, AttemptsLayer, Backoff, BoxError, BreakerLayer, BudgetLayer, ClassifyLayer, Fleet,
    FleetLimitLayer, HashedFailover, JitteredRetryLayer, Provider, ProviderSettings, RampedReadmissionLayer,
    Refusal, RefusalKind, RetryAfterLayer, SpendLayer, Task, TaskLayer, TokenLimitLayer, ToolCallsLayer,
    breaker::BreakerState, failover::Rung, retry::Unlimited, spend::Amount, tool_calls::Call,
    usage::of_reply,
};

/// A layer, as what it makes of a service.
type Wrap = Box<dyn Fn(Boxed) -> Boxed>;

fn wrap<L>(layer: L) -> Wrap
where
    L: Layer<Boxed> + 'static,
    L::Service:
        Service<Request, Response = Response, Error: Into<BoxError>, Future: Send> + Clone + Send + 'static,
{
    Box::new(move |inner| Boxed::new(layer.layer(inner).map_err(Into::into)))
}

const DOCUMENTED: bool = false;
const SWAPPED: bool = true;

/// Both layers around `below`.
#[expect(clippy::needless_pass_by_value, reason = "a call reads as the list of layers that it is")]
fn pair(swapped: bool, outer: Wrap, inner: Wrap, below: Boxed) -> Boxed {
    if swapped { inner(outer(below)) } else { outer(inner(below)) }
}

/// A script as a service with the errors of a stack.
fn bare(script: &Script) -> Boxed {
    Boxed::new(script.clone().map_err(BoxError::from))
}

fn sensed(provider: &Provider, script: &Script) -> Boxed {
    wrap(ClassifyLayer::new(provider).replies())(bare(script))
}

fn provider() -> Provider {
    Fleet::local().seed(1).provider("p")
}

fn with(settings: ProviderSettings) -> Provider {
    Fleet::local().seed(1).configure("p", settings).unwrap()
}

fn retry() -> JitteredRetryLayer {
    JitteredRetryLayer::new().budget(Unlimited).seed(1)
}

/// What becomes of a call, and after how long.
fn ask(service: &Boxed, request: Request) -> impl Future<Output = (Result<u16, Refusal>, Duration)> + use<> {
    let call = service.clone().oneshot(request);
    async move {
        let start = Instant::now();
        let outcome = match call.await {
            Ok(reply) => Ok(reply.status().as_u16()),
            Err(error) => Err(Refusal::find(&*error).expect("a refusal").clone()),
        };
        (outcome, start.elapsed())
    }
}

fn kind(outcome: &Result<u16, Refusal>) -> Option<RefusalKind> {
    outcome.as_ref().err().map(|refusal| refusal.kind)
}

fn of(task: &Task) -> Request {
    let mut request = request(0);
    request.extensions_mut().insert(task.clone());
    request
}

/// Of an account that holds one unit, which each call costs.
fn spend(provider: &Provider) -> Wrap {
    let used = of_reply(|_: &Response| Some(Amount::units(1)));
    wrap(SpendLayer::new(provider, |_: &Request| Amount::units(1), used))
}

fn poor() -> Task {
    Task::new(1).deadline_in(secs(1000)).spend(Amount::units(0))
}

/// Each call costs so many tokens as its path says.
fn tokens(provider: &Provider) -> Wrap {
    let used = of_reply(|_: &Response| None);
    let cost = |request: &Request| request.uri().path().trim_start_matches('/').parse::<u64>().unwrap();
    wrap(TokenLimitLayer::with(provider, cost, used))
}

fn costs(tokens: u64) -> Request {
    let mut request = request(tokens);
    *request.uri_mut() = format!("http://p.example/{tokens}").parse().unwrap();
    request
}

/// Closed for ten minutes, it gets its tasks back from now on. A task that is not among the first.
async fn recovering(provider: &Provider) -> u64 {
    let gate = wrap(RampedReadmissionLayer::new(provider))(bare(&Script::always(answer(200))));
    provider.pause_for(secs(3600));
    sleep(secs(600)).await;
    provider.clear_pause();
    late(&gate).await
}

/// A task that comes back in the second half of a ramp.
async fn late(gate: &Boxed) -> u64 {
    for key in 0.. {
        if let Err(refusal) = ask(gate, request(key)).await.0
            && refusal.wait().is_some_and(|wait| wait > secs(10))
        {
            return key;
        }
    }
    unreachable!("keys are not used up")
}

// ------------------------------------------------------------------------------- the task

#[tokio::test(start_paused = true)]
async fn task_outside_retry_or_each_attempt_has_an_allowance_of_its_own() {
    for (swapped, calls, tasks) in [(DOCUMENTED, 2, 1), (SWAPPED, 6, 6)] {
        let script = Script::always(answer(500));
        let (task, retry) = (wrap(TaskLayer::new().allowance(2)), wrap(retry().attempts(6)));
        let service = pair(swapped, task, retry, bare(&script));
        let request = http::Request::get("http://p.example/").body(String::new()).unwrap();
        assert_eq!(ask(&service, request).await.0, Ok(500));
        let seen = script.seen.lock().unwrap();
        let ids: std::collections::HashSet<_> =
            seen.iter().map(|(_, task, _)| task.as_ref().unwrap().id()).collect();
        assert_eq!((seen.len(), ids.len()), (calls, tasks), "swapped: {swapped}");
    }
}

#[tokio::test(start_paused = true)]
async fn task_outside_retry_or_no_wait_ends_at_its_deadline() {
    for (swapped, in_time) in [(DOCUMENTED, true), (SWAPPED, false)] {
        let script = Script::always(answer(500).after(secs(1)));
        let task = wrap(TaskLayer::new().deadline(secs(5)).allowance(100));
        let retry = wrap(retry().attempts(20));
        let service = pair(swapped, task, retry, bare(&script));
        let request = http::Request::get("http://p.example/").body(String::new()).unwrap();
        let (_, took) = ask(&service, request).await;
        assert_eq!(took <= secs(6), in_time, "swapped: {swapped}, {took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn tool_calls_outside_retry_or_a_repetition_counts_as_one_of_the_model() {
    for (swapped, outcome, calls) in [(DOCUMENTED, 200, 2), (SWAPPED, 500, 1)] {
        let p = provider();
        let script = Script::new(|n, _| answer(if n == 0 { 500 } else { 200 }));
        let tool = |request: &Request| Some(Call::new("search", request.body(), "q"));
        let tools = wrap(ToolCallsLayer::new(&p, tool).calls(1));
        let service = pair(swapped, tools, wrap(retry()), bare(&script));
        let got = ask(&service, request(1)).await.0;
        // The second attempt is one call too many; the reply of the first is returned.
        assert_eq!((got, script.calls()), (Ok(outcome), calls), "swapped: {swapped}");
    }
}

// ------------------------------------------------------------------------------ the ladder

fn ladder(rungs: impl IntoIterator<Item = (Provider, Boxed)>) -> Boxed {
    let rungs = (0..).zip(rungs).map(|(tier, (provider, stack))| Rung::new(&provider, stack).tier(tier));
    Boxed::new(HashedFailover::new(rungs).unwrap())
}

fn two() -> (Provider, Provider) {
    let fleet = Fleet::local().seed(1);
    (fleet.provider("a"), fleet.provider("b"))
}

#[tokio::test(start_paused = true)]
async fn retry_outside_failover_or_a_dead_rung_uses_up_the_attempts() {
    for (swapped, outcome, calls) in [(DOCUMENTED, 200, [1, 1]), (SWAPPED, 500, [3, 0])] {
        let (a, b) = two();
        let (dead, well) = (Script::always(answer(500)), Script::always(answer(200)));
        let (first, second) = (rung(&a, dead.clone()), rung(&b, well.clone()));
        let retry = wrap(retry());
        let service = match swapped {
            DOCUMENTED => retry(ladder([(a, first), (b, second)])),
            SWAPPED => ladder([(a, retry(first)), (b, retry(second))]),
        };
        let (got, took) = ask(&service, request(1)).await;
        assert_eq!((got, [dead.calls(), well.calls()]), (Ok(outcome), calls), "swapped: {swapped}");
        assert_eq!(took.is_zero(), swapped == DOCUMENTED, "it slept while the other was idle");
    }
}

#[tokio::test(start_paused = true)]
async fn failover_outside_readmission_or_who_is_not_back_at_one_is_kept_from_all() {
    for (swapped, outcome) in [(DOCUMENTED, Ok(200)), (SWAPPED, Err(RefusalKind::NotReadmitted))] {
        let (a, b) = two();
        let late = recovering(&a).await;
        let (first, second) = (Script::always(answer(200)), Script::always(answer(200)));
        let ramp = wrap(RampedReadmissionLayer::new(&a));
        let (one, other) = (rung(&a, first.clone()), rung(&b, second.clone()));
        let service = match swapped {
            DOCUMENTED => ladder([(a, ramp(one)), (b, other)]),
            SWAPPED => ramp(ladder([(a, one), (b, other)])),
        };
        let got = ask(&service, request(late)).await.0.map_err(|refusal| refusal.kind);
        assert_eq!(got, outcome, "swapped: {swapped}");
        assert_eq!((first.calls(), second.calls()), (0, usize::from(outcome.is_ok())));
    }
}

#[tokio::test(start_paused = true)]
async fn failover_outside_pause_or_a_paused_rung_stops_the_others() {
    for (swapped, served_at_once) in [(DOCUMENTED, true), (SWAPPED, false)] {
        let (a, b) = two();
        a.pause_for(secs(30));
        let (first, second) = (Script::always(answer(200)), Script::always(answer(200)));
        let pause = wrap(RetryAfterLayer::new(&a));
        let (one, other) = (sensed(&a, &first), sensed(&b, &second));
        let service = match swapped {
            DOCUMENTED => ladder([(a, pause(one)), (b, other)]),
            SWAPPED => pause(ladder([(a, one), (b, other)])),
        };
        let (got, took) = ask(&service, request(1)).await;
        assert_eq!((got, took < secs(1)), (Ok(200), served_at_once), "swapped: {swapped}, {took:?}");
    }
}

// --------------------------------------------------------------------- who refuses, then who waits

#[tokio::test(start_paused = true)]
async fn readmission_outside_spend_or_money_is_reserved_for_calls_that_are_turned_away() {
    use RefusalKind::{NotReadmitted, Spend};
    for (swapped, kinds) in [(DOCUMENTED, [NotReadmitted, NotReadmitted]), (SWAPPED, [NotReadmitted, Spend])]
    {
        let p = provider();
        let late = recovering(&p).await;
        let script = Script::always(answer(200));
        let ramp = wrap(RampedReadmissionLayer::new(&p));
        let mut service = pair(swapped, ramp, spend(&p), sensed(&p, &script));
        // Money for one of two calls that come at the same time.
        let task = Task::new(late).deadline_in(secs(600)).spend(Amount::units(1));
        let calls = [service.call(of(&task)), service.call(of(&task))];
        let mut got = vec![];
        for call in calls {
            got.push(Refusal::find(&*call.await.unwrap_err()).unwrap().kind);
        }
        assert_eq!(got, kinds, "swapped: {swapped}");
        assert_eq!(script.calls(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn readmission_and_breaker_may_change_places_over_a_sensor() {
    let mut seen = vec![];
    for swapped in [DOCUMENTED, SWAPPED] {
        let p = provider();
        let script = Script::new(|n, _| answer(if n < 5 { 500 } else { 200 }));
        let breaker = BreakerLayer::new(&p).strict().unwrap();
        let handle = breaker.handle();
        let ramp = wrap(RampedReadmissionLayer::new(&p));
        let service = pair(swapped, ramp, wrap(breaker), rung(&p, script.clone()));
        for key in 0..5 {
            assert_eq!(ask(&service, request(key)).await.0, Ok(500));
        }
        assert_eq!(kind(&ask(&service, request(1)).await.0), Some(RefusalKind::Open));
        sleep(secs(60)).await;
        // The probe, whatever its key; then the ramp.
        let probe = ask(&service, request(7)).await.0;
        assert_eq!((probe, handle.state()), (Ok(200), BreakerState::Closed), "swapped: {swapped}");
        let mut refused = vec![];
        for key in 0..200 {
            if let Some(kind) = kind(&ask(&service, request(key)).await.0) {
                assert_eq!(kind, RefusalKind::NotReadmitted);
                refused.push(key);
            }
        }
        assert!(refused.len() > 150);
        seen.push((refused, script.calls(), handle.failures()));
    }
    assert_eq!(seen[0], seen[1]);
}

#[tokio::test(start_paused = true)]
async fn readmission_outside_pause_or_who_is_not_back_learns_it_after_the_pause() {
    for (swapped, at_once) in [(DOCUMENTED, true), (SWAPPED, false)] {
        let p = provider();
        let late = recovering(&p).await;
        // Others may be the probe of the pause, and not this task alone.
        p.pause_for(secs(400));
        let script = Script::always(answer(200));
        let ramp = wrap(RampedReadmissionLayer::new(&p));
        let service = pair(swapped, ramp, wrap(RetryAfterLayer::new(&p)), sensed(&p, &script));
        let calls: Vec<_> = (0..10)
            .map(|n| {
                let task = Task::new(n).affinity(late).deadline_in(secs(1000));
                tokio::spawn(ask(&service, of(&task)))
            })
            .collect();
        let mut refused = vec![];
        for call in calls {
            let (outcome, took) = call.await.unwrap();
            if let Err(refusal) = outcome {
                assert_eq!(refusal.kind, RefusalKind::NotReadmitted);
                refused.push(took);
            }
        }
        assert!(refused.len() >= 9, "{refused:?}");
        let right = |took: &Duration| if at_once { took.is_zero() } else { *took >= secs(300) };
        assert!(refused.iter().all(right), "swapped: {swapped}, {refused:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn spend_outside_breaker_or_who_has_no_money_is_told_to_come_back() {
    for (swapped, refused) in [(DOCUMENTED, RefusalKind::Spend), (SWAPPED, RefusalKind::Open)] {
        let p = provider();
        let breaker = BreakerLayer::new(&p);
        breaker.handle().force_open();
        let script = Script::always(answer(200));
        let service = pair(swapped, spend(&p), wrap(breaker), sensed(&p, &script));
        let refusal = ask(&service, of(&poor())).await.0.unwrap_err();
        assert_eq!(refusal.kind, refused, "swapped: {swapped}");
        assert_eq!(refusal.retry_at.is_some(), swapped, "an instant to come back at");
    }
}

#[tokio::test(start_paused = true)]
async fn spend_outside_pause_or_who_has_no_money_waits_to_be_told() {
    for (swapped, at_once) in [(DOCUMENTED, true), (SWAPPED, false)] {
        let p = provider();
        p.pause_for(secs(30));
        let script = Script::always(answer(200));
        let service = pair(swapped, spend(&p), wrap(RetryAfterLayer::new(&p)), sensed(&p, &script));
        let (outcome, took) = ask(&service, of(&poor())).await;
        assert_eq!(kind(&outcome), Some(RefusalKind::Spend));
        assert_eq!((took.is_zero(), took >= secs(30)), (at_once, !at_once), "swapped: {swapped}");
    }
}

#[tokio::test(start_paused = true)]
async fn breaker_outside_budget_or_its_callers_are_told_the_wrong_instant() {
    for swapped in [DOCUMENTED, SWAPPED] {
        let p = provider();
        let script = Script::always(answer(500));
        let (breaker, budget) = (BreakerLayer::new(&p), BudgetLayer::new(&p));
        let handle = breaker.handle();
        let service = pair(swapped, wrap(breaker), wrap(budget), sensed(&p, &script));
        for key in 0..1000 {
            ask(&service, request(key)).await.0.ok();
            if handle.state() == BreakerState::Open {
                break;
            }
        }
        let end = handle.open_until().expect("it is open");
        let mut open = 0;
        for key in 1000..1100 {
            let refusal = ask(&service, request(key)).await.0.unwrap_err();
            if refusal.kind == RefusalKind::Open {
                assert_eq!(refusal.retry_at, Some(end));
                open += 1;
            } else {
                assert_eq!(refusal.kind, RefusalKind::Shed);
                assert!(refusal.wait().unwrap() <= secs(2));
            }
        }
        assert_eq!(open == 100, swapped == DOCUMENTED, "swapped: {swapped}, {open}");
        assert!(swapped == DOCUMENTED || open < 40, "most are shed: {open}");
    }
}

#[tokio::test(start_paused = true)]
async fn breaker_outside_pause_or_its_callers_sit_out_the_open_time() {
    for (swapped, at_once) in [(DOCUMENTED, true), (SWAPPED, false)] {
        let p = provider();
        let script = Script::always(answer(500));
        let breaker = BreakerLayer::new(&p).strict().unwrap();
        let pause = wrap(RetryAfterLayer::new(&p));
        let service = pair(swapped, wrap(breaker), pause, sensed(&p, &script));
        for key in 0..5 {
            ask(&service, request(key)).await.0.ok();
        }
        let task = Task::new(9).deadline_in(secs(3600));
        // The first may be a probe, which is an ordinary call.
        let calls = [(); 3].map(|()| tokio::spawn(ask(&service, of(&task))));
        sleep(secs(1)).await;
        let done = calls.iter().filter(|call| call.is_finished()).count();
        assert_eq!(done, if at_once { 3 } else { 0 }, "swapped: {swapped}");
    }
}

#[tokio::test(start_paused = true)]
async fn budget_outside_pause_or_a_call_waits_to_be_thrown_away() {
    for (swapped, at_once) in [(DOCUMENTED, true), (SWAPPED, false)] {
        let p = provider();
        let script = Script::always(answer(500));
        let (budget, pause) = (wrap(BudgetLayer::new(&p)), wrap(RetryAfterLayer::new(&p)));
        let service = pair(swapped, budget, pause, sensed(&p, &script));
        for key in 0..100 {
            ask(&service, request(key)).await.0.ok();
        }
        p.pause_for(secs(5));
        let calls: Vec<_> = (1000..1050).map(|key| tokio::spawn(ask(&service, request(key)))).collect();
        let mut shed = vec![];
        for call in calls {
            let (outcome, took) = call.await.unwrap();
            if kind(&outcome) == Some(RefusalKind::Shed) {
                shed.push(took);
            }
        }
        assert!(shed.len() > 20, "{shed:?}");
        let right = |took: &Duration| if at_once { took.is_zero() } else { *took >= secs(5) };
        assert!(shed.iter().all(right), "swapped: {swapped}, {shed:?}");
    }
}

// ------------------------------------------------------------------------- what is scarce is taken last

#[tokio::test(start_paused = true)]
async fn pause_outside_tokens_or_a_paused_scope_holds_what_another_could_use() {
    for (swapped, at_once) in [(DOCUMENTED, true), (SWAPPED, false)] {
        let p = with(ProviderSettings::new().tokens_per_minute(60));
        let (paused, open) = (p.scope("paused"), p.scope("open"));
        let script = Script::always(answer(200));
        let stack = |scope: &Provider| {
            pair(swapped, wrap(RetryAfterLayer::new(scope)), tokens(scope), sensed(scope, &script))
        };
        paused.pause_for(secs(120));
        let (waits, passes) = (stack(&paused), stack(&open));
        let waiting = tokio::spawn(waits.oneshot(costs(60)));
        tokio::task::yield_now().await;
        let (outcome, took) = ask(&passes, costs(30)).await;
        assert_eq!((outcome, took.is_zero()), (Ok(200), at_once), "swapped: {swapped}, {took:?}");
        waiting.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn tokens_outside_limit_or_who_waits_for_tokens_holds_a_slot() {
    for (swapped, at_once) in [(DOCUMENTED, true), (SWAPPED, false)] {
        let p = with(ProviderSettings::new().tokens_per_minute(60).ceiling(1).aborts(true));
        let script = Script::always(answer(200));
        let limit = || FleetLimitLayer::new(&p).until_reply();
        let service = pair(swapped, tokens(&p), wrap(limit()), sensed(&p, &script));
        assert_eq!(ask(&service, costs(60)).await.0, Ok(200));
        let large = tokio::spawn(service.oneshot(costs(60)));
        tokio::task::yield_now().await;
        assert_eq!(p.in_flight(), u32::from(swapped));
        // Embeddings, say, that are not counted in tokens.
        let (outcome, took) = ask(&wrap(limit())(sensed(&p, &script)), request(1)).await;
        assert_eq!((outcome, took.is_zero()), (Ok(200), at_once), "swapped: {swapped}, {took:?}");
        assert_eq!(large.await.unwrap().unwrap().status(), 200);
    }
}

#[tokio::test(start_paused = true)]
async fn pause_outside_limit_or_a_patience_comes_too_late() {
    for (swapped, at_once) in [(DOCUMENTED, true), (SWAPPED, false)] {
        let p = provider();
        p.pause_for(secs(30));
        let script = Script::always(answer(200));
        let pause = wrap(RetryAfterLayer::new(&p).patience(secs(1)));
        let limit = wrap(FleetLimitLayer::new(&p).until_reply());
        let service = pair(swapped, pause, limit, sensed(&p, &script));
        let (outcome, took) = ask(&service, request(1)).await;
        assert_eq!(kind(&outcome), at_once.then_some(RefusalKind::Paused), "swapped: {swapped}");
        assert_eq!(took.is_zero(), at_once);
    }
}

#[tokio::test(start_paused = true)]
async fn pause_outside_limit_or_who_waits_for_a_scope_waits_for_its_own_slot() {
    for swapped in [DOCUMENTED, SWAPPED] {
        let p = with(ProviderSettings::new().ceiling(1).aborts(true));
        let model = p.scope("model");
        model.pause_for(secs(30));
        let script = Script::always(answer(200));
        // A limit for all of the provider, a pause for a part of it.
        let limit = || FleetLimitLayer::new(&p).until_reply();
        let pause = wrap(RetryAfterLayer::new(&model));
        let service = pair(swapped, pause, wrap(limit()), sensed(&p, &script));
        let waiting = tokio::spawn(ask(&service, until(1, secs(120))));
        tokio::task::yield_now().await;
        assert_eq!(p.in_flight(), u32::from(swapped), "held while it waits");
        let (other, took) = ask(&wrap(limit())(sensed(&p, &script)), request(2)).await;
        let (waited, _) = waiting.await.unwrap();
        assert_eq!(other, Ok(200));
        // Swapped, it takes a second slot at the end of the pause: the only one is its own.
        let (lost, late) = (Some(RefusalKind::NoSlot), secs(120));
        let expected = if swapped { (lost, late) } else { (None, Duration::ZERO) };
        assert_eq!((kind(&waited), took), expected, "swapped: {swapped}");
    }
}

#[tokio::test(start_paused = true)]
async fn retry_outside_limit_or_who_sleeps_holds_a_slot() {
    for (swapped, at_once) in [(DOCUMENTED, true), (SWAPPED, false)] {
        let p = with(ProviderSettings::new().ceiling(1).aborts(true));
        let script = Script::new(|n, _| answer(if n == 0 { 500 } else { 200 }));
        let retry = wrap(retry().base(secs(10)).backoff(Backoff::Equal));
        let limit = wrap(FleetLimitLayer::new(&p).until_reply());
        let service = pair(swapped, retry, limit, sensed(&p, &script));
        let unlucky = tokio::spawn(service.clone().oneshot(request(1)));
        tokio::task::yield_now().await;
        let (outcome, took) = ask(&service, request(2)).await;
        assert_eq!((outcome, took < secs(1)), (Ok(200), at_once), "swapped: {swapped}, {took:?}");
        unlucky.await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn retry_outside_pause_or_a_repetition_goes_out_in_a_pause() {
    for (swapped, obeys) in [(DOCUMENTED, true), (SWAPPED, false)] {
        let p = provider();
        let script = Script::new(|n, _| answer(if n == 0 { 500 } else { 200 }));
        let pause = wrap(RetryAfterLayer::new(&p));
        let service = pair(swapped, wrap(retry()), pause, sensed(&p, &script));
        let start = Instant::now();
        let call = tokio::spawn(service.oneshot(request(1)));
        while script.calls() == 0 {
            tokio::task::yield_now().await;
        }
        p.pause_for(secs(60)); // what another met meanwhile
        assert_eq!(call.await.unwrap().unwrap().status(), 200);
        let times = script.times(start);
        assert_eq!((times.len(), times[1] >= 60_000), (2, obeys), "swapped: {swapped}, {times:?}");
    }
}

// -------------------------------------------------------------------------------- at the wire

#[tokio::test(start_paused = true)]
async fn limit_outside_attempts_or_the_time_before_the_queue_is_told() {
    for (swapped, told) in [(DOCUMENTED, "ms=10000"), (SWAPPED, "ms=20000")] {
        let p = with(ProviderSettings::new().ceiling(1));
        let heard = Arc::new(Mutex::new(vec![]));
        let script = Script::new({
            let heard = heard.clone();
            move |_, request| {
                let header = request.headers()["tower-herd-attempts"].to_str().unwrap();
                heard.lock().unwrap().push(header.to_owned());
                answer(200).after(secs(10))
            }
        });
        let limit = wrap(FleetLimitLayer::new(&p).until_reply());
        let attempts = wrap(AttemptsLayer::new(&p).tell_first(true));
        let service = pair(swapped, limit, attempts, sensed(&p, &script));
        let calls = [1, 2].map(|id| tokio::spawn(service.clone().oneshot(until(id, secs(20)))));
        for call in calls {
            call.await.unwrap().unwrap();
        }
        let heard = heard.lock().unwrap();
        assert!(heard[0].contains("ms=20000") && heard[1].contains(told), "swapped: {swapped}, {heard:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn attempts_and_classify_may_change_places() {
    let mut seen = vec![];
    for swapped in [DOCUMENTED, SWAPPED] {
        let p = provider();
        let heard = Arc::new(Mutex::new(vec![]));
        let script = Script::new({
            let heard = heard.clone();
            move |n, request| {
                heard.lock().unwrap().push(request.headers().get("tower-herd-attempts").cloned());
                if n == 0 { answer(429).header("retry-after", 5) } else { answer(200) }
            }
        });
        let (attempts, sensor) = (wrap(AttemptsLayer::new(&p)), wrap(ClassifyLayer::new(&p).replies()));
        let gates = pair(swapped, attempts, sensor, bare(&script));
        let service = wrap(retry())(wrap(RetryAfterLayer::new(&p))(gates));
        let mut request = request(1);
        request.extensions_mut().insert(Task::new(1).deadline_in(secs(600)));
        let start = Instant::now();
        assert_eq!(ask(&service, request).await.0, Ok(200));
        let heard: Vec<_> = heard.lock().unwrap().iter().map(Option::is_some).collect();
        assert_eq!((p.throttled(), &*heard), (1, &[false, true][..]), "swapped: {swapped}");
        assert!(script.times(start)[1] >= 5000);
        seen.push(script.calls());
    }
    assert_eq!(seen, [2, 2]);
}

#[tokio::test(start_paused = true)]
async fn retry_outside_classify_or_what_is_repeated_is_never_learned() {
    for (swapped, throttled) in [(DOCUMENTED, 2), (SWAPPED, 0)] {
        let p = provider();
        let script =
            Script::new(|n, _| if n < 2 { answer(429).header("retry-after", 1) } else { answer(200) });
        let sensor = wrap(ClassifyLayer::new(&p).replies());
        let service = pair(swapped, wrap(retry()), sensor, bare(&script));
        assert_eq!(ask(&service, request(1)).await.0, Ok(200));
        assert_eq!((script.calls(), p.throttled()), (3, throttled), "swapped: {swapped}");
    }
}

#[tokio::test(start_paused = true)]
async fn classify_outside_timeout_or_a_dead_provider_looks_healthy() {
    for (swapped, state) in [(DOCUMENTED, BreakerState::Open), (SWAPPED, BreakerState::Closed)] {
        let p = provider();
        let script = Script::always(answer(200).after(secs(1000)));
        let breaker = BreakerLayer::new(&p).strict().unwrap();
        let handle = breaker.handle();
        let sensor = wrap(ClassifyLayer::new(&p).replies());
        let timed = wrap(AttemptTimeoutLayer::new(secs(5)).replies());
        let service = wrap(breaker)(pair(swapped, sensor, timed, bare(&script)));
        for key in 0..5 {
            let outcome = service.clone().oneshot(request(key)).await;
            assert!(outcome.is_err());
        }
        assert_eq!((script.calls(), handle.state()), (5, state), "swapped: {swapped}");
    }
}

#[tokio::test(start_paused = true)]
async fn limit_outside_classify_or_the_time_in_our_own_queue_counts_as_the_providers() {
    for (swapped, free_after) in [(DOCUMENTED, ms(200)), (SWAPPED, secs(2))] {
        let p = with(ProviderSettings::new().ceiling(1));
        let script = Script::always(answer(200).after(ms(100)));
        let limit = wrap(FleetLimitLayer::new(&p).until_reply());
        let sensor = wrap(ClassifyLayer::new(&p).replies());
        let service = pair(swapped, limit, sensor, bare(&script));
        let line: Vec<_> = (0..30).map(|key| tokio::spawn(service.clone().oneshot(request(key)))).collect();
        for call in line {
            call.await.unwrap().unwrap();
        }
        assert!(timeout(ms(50), service.oneshot(request(99))).await.is_err());
        // The call may still run there: its slot stays taken for as long as calls last, as far as is known.
        let dropped = Instant::now();
        while p.in_flight() > 0 {
            sleep(ms(10)).await;
        }
        let free = dropped.elapsed();
        let right = if swapped { free >= free_after } else { free <= free_after };
        assert!(right, "swapped: {swapped}, {free:?}");
    }
}
