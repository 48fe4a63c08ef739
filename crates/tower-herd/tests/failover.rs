//! The ladder, as callers see it.

mod common;

use common::{Answer, Request, Script, answer, ms, request, secs};
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};
use tokio::time::Instant;
use tower::{Layer, ServiceBuilder, ServiceExt, layer::util::Stack, service_fn};
use tower_herd::{
    Fleet, FleetLimitLayer, HashedFailover, HashedFailoverLayer, Kind, Provider, ProviderSettings, Refusal,
    RefusalKind, RetryAfterLayer, Safety, Signal, Task,
    failover::{LadderError, Rung},
    fleet_limit::UntilReply,
};

type Layers = Stack<FleetLimitLayer<UntilReply>, Stack<RetryAfterLayer, tower::layer::util::Identity>>;

fn layers(provider: &Provider) -> Layers {
    ServiceBuilder::new()
        .layer(RetryAfterLayer::new(provider))
        .layer(FleetLimitLayer::new(provider).until_reply())
        .into_inner()
}

fn rung(provider: &Provider, script: &Script) -> Rung<<Layers as Layer<Script>>::Service, Request> {
    Rung::new(provider, layers(provider).layer(script.clone()))
}

struct Ladder {
    providers: Vec<Provider>,
    scripts: Vec<Script>,
}

/// Tiers of one rung each, in order.
fn ladder(ceilings: &[u32], answers: &[Answer]) -> Ladder {
    let fleet = Fleet::local().seed(1);
    let providers = ceilings
        .iter()
        .enumerate()
        .map(|(i, ceiling)| {
            let settings = ProviderSettings::new().ceiling(*ceiling).aborts(true);
            fleet.configure(&format!("rung-{i}"), settings).unwrap()
        })
        .collect();
    Ladder { providers, scripts: answers.iter().cloned().map(Script::always).collect() }
}

impl Ladder {
    fn service(&self) -> HashedFailover<<Layers as Layer<Script>>::Service, Request> {
        let rungs = self.providers.iter().zip(&self.scripts).enumerate();
        HashedFailover::new(rungs.map(|(i, (p, s))| rung(p, s).tier(i as u32))).unwrap()
    }
    fn calls(&self) -> Vec<usize> {
        self.scripts.iter().map(Script::calls).collect()
    }
}

// maximhq/bifrost#3261, langwatch#7027: the configured fallback never fires on 429, or only once.
#[tokio::test(start_paused = true)]
async fn a_long_429_goes_on_rung_by_rung() {
    let long = || answer(429).header("retry-after", 30);
    let ladder = ladder(&[5, 5, 5], &[long(), long(), answer(200)]);
    let reply = ladder.service().oneshot(request(1)).await.unwrap();
    assert_eq!((reply.status().as_u16(), ladder.calls()), (200, vec![1, 1, 1]));
}

// superagent#1145, AionUi#2782: every short 429 jumps, and the spare rung burns too.
#[tokio::test(start_paused = true)]
async fn a_short_429_goes_out_to_the_retry_layer() {
    let ladder = ladder(&[5, 5], &[answer(429).header("retry-after", 1), answer(200)]);
    let reply = ladder.service().oneshot(request(1)).await.unwrap();
    assert_eq!((reply.status().as_u16(), ladder.calls()), (429, vec![1, 0]));
}

// How short is short, is for the caller to say; in either form of the ladder.
#[tokio::test(start_paused = true)]
async fn the_patience_for_a_hint_says_which_429_goes_on() {
    for (patience, hint, goes_on) in [(2, 2, false), (0, 1, true), (2, 5, true), (5, 5, false), (5, 6, true)]
    {
        let expected = if goes_on { (200, vec![1, 1]) } else { (429, vec![1, 0]) };
        let once = || ladder(&[5, 5], &[answer(429).header("retry-after", hint), answer(200)]);
        let two = once();
        let reply = two.service().hint_patience(secs(patience)).oneshot(request(1)).await.unwrap();
        assert_eq!((reply.status().as_u16(), two.calls()), expected, "{patience} s for {hint} s");

        let two = once();
        let rungs = two.providers.iter().zip(0..).map(|(provider, tier)| {
            Rung::new(provider, layers(provider)).tier(tier).map(move |mut request: Request| {
                *request.uri_mut() =
                    ["http://a.example/", "http://b.example/"][tier as usize].parse().unwrap();
                request
            })
        });
        let layer = HashedFailoverLayer::new(rungs).unwrap().hint_patience(secs(patience));
        let scripts = two.scripts.clone();
        let client = service_fn(move |request: Request| {
            let at = usize::from(request.uri().host() == Some("b.example"));
            scripts[at].clone().oneshot(request)
        });
        let reply = layer.layer(client).oneshot(request(1)).await.unwrap();
        assert_eq!((reply.status().as_u16(), two.calls()), expected, "the layer, {patience} s for {hint} s");
    }
}

// voidmind-io/voidllm#184, api7/aisix#46, agentgateway#1500: errors fail over, once a rung.
#[tokio::test(start_paused = true)]
async fn a_failure_goes_on_if_the_request_may_suffer_it() {
    for (safety, expected) in [
        (Safety::Costly, (200, vec![1, 1])),
        (Safety::Safe, (200, vec![1, 1])),
        (Safety::Keyed, (503, vec![1, 0])),
        (Safety::Once, (503, vec![1, 0])),
    ] {
        let ladder = ladder(&[5, 5], &[answer(503), answer(200)]);
        let mut request = request(1);
        request.extensions_mut().insert(safety);
        let reply = ladder.service().oneshot(request).await.unwrap();
        assert_eq!((reply.status().as_u16(), ladder.calls()), expected, "{safety:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_walk_stays_within_the_tasks_allowance() {
    let ladder = ladder(&[5, 5, 5, 5], &vec![answer(500); 4]);
    let mut request = request(1);
    let task = Task::new(1).allowance(2);
    request.extensions_mut().insert(task.clone());
    let reply = ladder.service().oneshot(request).await.unwrap();
    assert_eq!((reply.status().as_u16(), ladder.calls()), (500, vec![1, 1, 0, 0]));
    assert_eq!(task.spent(), 1, "the reply that goes out is charged by who gets it");
}

#[tokio::test(start_paused = true)]
async fn a_request_at_fault_ends_the_chain() {
    let ladder = ladder(&[5, 5], &[answer(400), answer(200)]);
    let reply = ladder.service().oneshot(request(1)).await.unwrap();
    assert_eq!((reply.status().as_u16(), ladder.calls()), (400, vec![1, 0]));
}

fn empty_on_204() -> impl tower_herd::Classify<common::Response> + Clone {
    tower_herd::http::classify_head(|head: tower_herd::http::Head<'_>| {
        (head.status == 204).then(|| Signal::new(Kind::Empty))
    })
}

#[tokio::test(start_paused = true)]
async fn empty_on_three_free_rungs_reaches_the_paid_one_which_ends_the_chain() {
    let ladder = ladder(&[5; 5], &[answer(204), answer(204), answer(204), answer(204), answer(200)]);
    let rungs = ladder.providers.iter().zip(&ladder.scripts).enumerate();
    let task = Task::new(1).allowance(1);
    let service = HashedFailover::new(rungs.map(|(i, (p, s))| {
        let rung = rung(p, s).tier(i as u32);
        if i >= 3 { rung.paid() } else { rung }
    }))
    .unwrap()
    .classify(empty_on_204());
    let mut request = request(1);
    request.extensions_mut().insert(task.clone());
    let reply = service.oneshot(request).await.unwrap();
    assert_eq!((reply.status().as_u16(), ladder.calls()), (204, vec![1, 1, 1, 1, 0]));
    assert_eq!(task.spent(), 0, "an empty answer costs no attempt");
}

#[tokio::test(start_paused = true)]
async fn empty_waits_for_the_next_rung_where_a_failure_does_not() {
    for (first, expected) in [(answer(204), (200, 1001..1200)), (answer(500), (500, 0..10))] {
        let ladder = ladder(&[5, 1], &[first, answer(200).after(secs(1))]);
        let busy = tokio::spawn(rung_only(&ladder, 1).oneshot(request(9)));
        tokio::task::yield_now().await;
        let start = Instant::now();
        let reply = ladder.service().classify(empty_on_204()).oneshot(request(1)).await.unwrap();
        assert_eq!(reply.status(), expected.0);
        let times: Vec<u64> = ladder.scripts[1].times(start);
        if expected.0 == 200 {
            assert!(times[1] >= 1000, "{times:?}");
        }
        busy.await.unwrap().unwrap();
    }
}

fn rung_only(ladder: &Ladder, i: usize) -> HashedFailover<<Layers as Layer<Script>>::Service, Request> {
    HashedFailover::new([rung(&ladder.providers[i], &ladder.scripts[i])]).unwrap()
}

// BerriAI/litellm#16092: a drained account kept receiving traffic.
#[tokio::test(start_paused = true)]
async fn a_drained_or_misconfigured_rung_is_left_and_benched() {
    for status in [402, 401] {
        let ladder = ladder(&[5, 5], &[answer(status), answer(200)]);
        for i in 0..5 {
            let reply = ladder.service().oneshot(request(i)).await.unwrap();
            assert_eq!(reply.status(), 200);
        }
        assert_eq!(ladder.calls(), [1, 5], "{status}: asked once, then paused");
        let (until, _) = ladder.providers[0].paused_until().unwrap();
        assert_eq!(until - Instant::now(), secs(15 * 60));
    }
}

#[tokio::test(start_paused = true)]
async fn who_finds_no_slot_waits_its_patience_and_then_overflows() {
    let ladder = ladder(&[1, 1], &[answer(200).after(secs(3)), answer(200).after(secs(3))]);
    let service = ladder.service();
    // so that the mean duration is not known yet, the estimate does not forbid to wait
    let start = Instant::now();
    let calls: Vec<_> = (0..3).map(|i| tokio::spawn(service.clone().oneshot(request(i)))).collect();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().status(), 200);
    }
    assert_eq!(ladder.scripts[0].times(start)[0], 0);
    assert!((500..520).contains(&ladder.scripts[1].times(start)[0]), "{:?}", ladder.scripts[1].times(start));
    let third = ladder.scripts.iter().flat_map(|s| s.times(start)).max().unwrap();
    assert!((3000..3020).contains(&third), "whichever frees first serves it: {third}");
}

#[tokio::test(start_paused = true)]
async fn the_patience_for_a_slot_says_when_a_task_overflows() {
    for patience in [300, 1500] {
        for as_layer in [false, true] {
            // How long a call takes is not known yet, and half of it is no bound.
            let two = ladder(&[1, 1], &[answer(200).after(secs(3)), answer(200).after(secs(3))]);
            let service = if as_layer {
                let script = two.scripts[0].clone();
                let rungs = two.providers.iter().zip(0..).map(|(p, tier)| Rung::new(p, layers(p)).tier(tier));
                let layer = HashedFailoverLayer::new(rungs).unwrap().slot_patience(ms(patience));
                common::Boxed::new(layer.layer(script))
            } else {
                common::Boxed::new(two.service().slot_patience(ms(patience)))
            };
            let start = Instant::now();
            let calls: Vec<_> = (0..2).map(|i| tokio::spawn(service.clone().oneshot(request(i)))).collect();
            for call in calls {
                assert_eq!(call.await.unwrap().unwrap().status(), 200);
            }
            let mut times: Vec<_> = two.scripts.iter().flat_map(|script| script.times(start)).collect();
            times.sort_unstable();
            assert!(times[0] == 0 && (patience..patience + 20).contains(&times[1]), "{patience}: {times:?}");
        }
    }
}

// BerriAI/litellm#3646, #27823: everything cooled down, and an instant error without Retry-After.
#[tokio::test(start_paused = true)]
async fn all_paused_it_waits_for_the_first_or_says_when() {
    let ladder = ladder(&[5, 5], &[answer(200), answer(200)]);
    ladder.providers[0].pause_for(secs(300));
    ladder.providers[1].pause_for(secs(20));
    let start = Instant::now();
    let reply = ladder.service().oneshot(request(1)).await.unwrap();
    assert_eq!((reply.status().as_u16(), ladder.calls()), (200, vec![0, 1]));
    assert!((20_000..20_100).contains(&ladder.scripts[1].times(start)[0]));
    ladder.providers[1].pause_for(secs(100));
    let now = Instant::now();
    let mut late = request(2);
    late.extensions_mut().insert(Task::new(2).deadline_in(secs(10)));
    let error = ladder.service().oneshot(late).await.unwrap_err();
    let refusal = Refusal::find(&*error).unwrap();
    assert_eq!((refusal.kind, refusal.retry_at), (RefusalKind::NoRung, Some(now + secs(100))));
}

// BerriAI/litellm#38968: the failed rung was picked again in the same walk.
#[tokio::test(start_paused = true)]
async fn a_rung_is_called_once_in_a_walk() {
    let ladder = ladder(&[5, 5, 5], &[answer(500), answer(502), answer(503)]);
    let mut request = request(1);
    request.extensions_mut().insert(Task::new(1).allowance(9));
    let reply = ladder.service().oneshot(request).await.unwrap();
    assert_eq!((reply.status().as_u16(), ladder.calls()), (503, vec![1, 1, 1]));
}

// KarpelesLab/teamclaude#84 to #309: thirty jumped together, and the next account died of it.
#[tokio::test(start_paused = true)]
async fn thirty_that_overflow_do_not_arrive_in_one_burst() {
    let fleet = Fleet::local();
    let providers = [fleet.provider("one"), fleet.provider("two")];
    let scripts = [
        Script::always(answer(429).header("retry-after", 60).after(ms(5))),
        Script::always(answer(200).after(secs(1))),
    ];
    let rungs = providers.iter().zip(&scripts).enumerate().map(|(i, (p, s))| rung(p, s).tier(i as u32));
    let service = HashedFailover::new(rungs).unwrap();
    let start = Instant::now();
    let calls: Vec<_> = (0..30).map(|i| tokio::spawn(service.clone().oneshot(request(i)))).collect();
    let mut ended = vec![];
    for call in calls {
        ended.push(call.await.unwrap().unwrap().status().as_u16());
    }
    let times = scripts[1].times(start);
    let burst = times.iter().filter(|at| **at < times[0] + 100).count();
    assert!(burst <= 5, "{times:?}");
    assert!(scripts[1].peak.load(Ordering::SeqCst) <= 30);
}

#[tokio::test(start_paused = true)]
async fn tasks_of_one_affinity_stay_together_and_shares_follow_weights() {
    let fleet = Fleet::local();
    let scripts: Vec<Script> = (0..3).map(|_| Script::always(answer(200))).collect();
    let rungs = scripts.iter().enumerate().map(|(i, script)| {
        let settings = ProviderSettings::new().ceiling(1000).aborts(true);
        let provider = fleet.configure(&format!("peer-{i}"), settings).unwrap();
        rung(&provider, script).weight([1.0, 1.0, 2.0][i])
    });
    let service = HashedFailover::new(rungs).unwrap();
    for i in 0..4000u64 {
        let mut request = request(i);
        request.extensions_mut().insert(Task::new(i).affinity(i % 1000));
        service.clone().oneshot(request).await.unwrap();
    }
    let shares: Vec<usize> = scripts.iter().map(Script::calls).collect();
    for (share, expected) in shares.iter().zip([1000usize, 1000, 2000]) {
        assert!(share.abs_diff(expected) < 200, "{shares:?}");
        assert_eq!(share % 4, 0, "the four tasks of one affinity go the same way");
    }
}

#[tokio::test(start_paused = true)]
async fn a_ladder_that_cannot_be_is_an_error() {
    let fleet = Fleet::local();
    let (one, script) = (fleet.provider("one"), Script::always(answer(200)));
    let none: [Rung<Script, Request>; 0] = [];
    assert_eq!(HashedFailover::new(none).unwrap_err(), LadderError::Empty);
    let twice = [Rung::new(&one, script.clone()), Rung::new(&one, script.clone())];
    assert_eq!(HashedFailover::<_, Request>::new(twice).unwrap_err(), LadderError::Twice("one".into()));
    let scopes = [Rung::new(&one.scope("a"), script.clone()), Rung::new(&one.scope("b"), script.clone())];
    assert!(HashedFailover::<_, Request>::new(scopes).is_ok());
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = HashedFailover::<_, Request>::new([Rung::new(&one, script.clone()).weight(weight)]);
        assert!(matches!(error.unwrap_err(), LadderError::Weight { .. }));
    }
    let many = (0..65).map(|i| Rung::new(&fleet.provider(&i.to_string()), script.clone()));
    assert_eq!(HashedFailover::<_, Request>::new(many).unwrap_err(), LadderError::TooMany(65));
}

#[tokio::test(start_paused = true)]
async fn dropped_at_any_point_it_leaves_no_slot_and_no_place() {
    for millis in [0, 1, 499, 500, 501, 999, 1000, 1001, 1999, 2000] {
        let ladder = ladder(&[1, 1], &[answer(200).after(secs(1)), answer(500).after(secs(1))]);
        let service = ladder.service();
        let calls: Vec<_> = (0..8)
            .map(|i| tokio::spawn(tokio::time::timeout(ms(millis), service.clone().oneshot(request(i)))))
            .collect();
        for call in calls {
            drop(call.await.unwrap());
        }
        for provider in &ladder.providers {
            assert_eq!((provider.in_flight(), provider.waiting()), (0, 0), "{millis} ms: {provider:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn rungs_change_the_request_on_its_way() {
    let ladder = ladder(&[5, 5], &[answer(500), answer(200)]);
    let rungs = ladder.providers.iter().zip(&ladder.scripts).enumerate().map(|(i, (p, s))| {
        rung(p, s).tier(i as u32).map(move |mut request: Request| {
            *request.uri_mut() = format!("http://rung-{i}.example/").parse().unwrap();
            request
        })
    });
    let reply = HashedFailover::new(rungs).unwrap().oneshot(request(1)).await.unwrap();
    assert_eq!(reply.status(), 200);
    reply.into_body();
    for (i, script) in ladder.scripts.iter().enumerate() {
        assert_eq!(script.seen.lock().unwrap()[0].2, format!("http://rung-{i}.example/"));
    }
}

// Law 4: what may have taken effect at one provider is repeated at no other.
#[tokio::test(start_paused = true)]
async fn a_keyed_write_stays_with_the_provider_that_may_have_executed_it() {
    let ladder = ladder(&[1, 5], &[answer(503).after(ms(10)), answer(200)]);
    let retrying = tower_herd::JitteredRetryLayer::new().attempts(3).layer(ladder.service());
    let mut keyed = request(1);
    keyed.extensions_mut().insert(Safety::Keyed);
    let reply = retrying.oneshot(keyed).await.unwrap();
    assert_eq!((reply.status().as_u16(), ladder.calls()), (503, vec![3, 0]));
    let from = reply.extensions().get::<tower_herd::classify::FromProvider>();
    assert_eq!(from.map(|from| &*from.0), Some("rung-0"));
}

// Law 3: the budget is kept by provider, and a repetition elsewhere is none there.
#[tokio::test(start_paused = true)]
async fn the_retry_budget_is_kept_by_provider() {
    use tower_herd::{Budget as _, RatioBudget};
    let ladder = ladder(&[5, 5], &[answer(500), answer(200)]);
    let budget = RatioBudget::new(0.5).reserve(0, secs(1000));
    let service =
        tower_herd::JitteredRetryLayer::new().budget(budget.clone()).layer(ladder.service().budget(&budget));
    for i in 0..10 {
        assert_eq!(service.clone().oneshot(request(i)).await.unwrap().status(), 200);
    }
    assert!(budget.of("rung-0").unwrap().try_withdraw(), "ten first calls paid in there");
    assert!(budget.of("rung-1").unwrap().try_withdraw());
    assert!(budget.of("elsewhere").is_none());
}

// Law 3: who sees the mark of a stack that has given up does not deposit, at the rung neither.
#[tokio::test(start_paused = true)]
async fn what_was_given_up_beyond_a_rung_pays_for_no_repetition() {
    use tower_herd::{Budget as _, RatioBudget};
    for (reply, pays) in [(answer(500).header("x-should-retry", "false"), false), (answer(404), true)] {
        let ladder = ladder(&[5], &[reply]);
        let budget = RatioBudget::new(0.5).reserve(0, secs(1000));
        let service = ladder.service().budget(&budget);
        let service = tower_herd::JitteredRetryLayer::new().budget(budget.clone()).layer(service);
        for i in 0..10 {
            service.clone().oneshot(request(i)).await.unwrap();
        }
        assert_eq!(ladder.calls(), [10]);
        assert_eq!(budget.of("rung-0").unwrap().try_withdraw(), pays);
        assert_eq!(budget.try_withdraw(), pays);
    }
}

// A ladder that was not given the budget: repetitions draw on the one pot, into which all calls pay.
#[tokio::test(start_paused = true)]
async fn a_ladder_without_the_budget_leaves_one_pot() {
    use tower_herd::RatioBudget;
    let ladder = ladder(&[50], &[answer(200)]);
    let flaky = Script::new(|nth, _| if nth % 10 == 0 { answer(500) } else { answer(200) });
    let service = HashedFailover::new([rung(&ladder.providers[0], &flaky)]).unwrap();
    let retrying = tower_herd::JitteredRetryLayer::new().budget(RatioBudget::new(0.2)).layer(service);
    for i in 0..400 {
        assert_eq!(retrying.clone().oneshot(request(i)).await.unwrap().status(), 200, "call {i}");
    }
}

// The same where the request belongs to no task: the copy that is sent again tells where it has been.
#[tokio::test(start_paused = true)]
async fn a_keyed_write_without_a_task_stays_there_too() {
    for seed in 0..10 {
        let fleet = Fleet::local();
        let seen: Arc<Mutex<Vec<&str>>> = Arc::default();
        let rungs = ["a", "b"].map(|name| {
            let seen = seen.clone();
            let script = Script::new(move |_, _| {
                seen.lock().unwrap().push(name);
                answer(503)
            });
            rung(&fleet.provider(name), &script)
        });
        let ladder = HashedFailover::new(rungs).unwrap();
        let retrying = tower_herd::JitteredRetryLayer::new().seed(seed).layer(ladder.clone());
        // A ladder without a task sends each request its own way.
        for _ in 0..seed {
            ladder.clone().oneshot(http::Request::put("/").body(String::new()).unwrap()).await.unwrap();
        }
        seen.lock().unwrap().clear();
        retrying.oneshot(http::Request::put("/").body(String::new()).unwrap()).await.unwrap();
        let seen = seen.lock().unwrap();
        assert!(seen.len() == 3 && seen.iter().all(|name| *name == seen[0]), "{seen:?}");
    }
}

// Nor does an error, which bears no mark of its provider, send it elsewhere.
#[tokio::test(start_paused = true)]
async fn a_keyed_write_that_was_lost_nobody_knows_where_is_not_repeated() {
    let fleet = Fleet::local();
    let calls = Arc::new(AtomicUsize::new(0));
    let rungs = ["a", "b"].map(|name| {
        let calls = calls.clone();
        let broken = service_fn(move |_: Request| {
            calls.fetch_add(1, Ordering::Relaxed);
            async { Err::<common::Response, tower_herd::BoxError>("reset".into()) }
        });
        Rung::new(&fleet.provider(name), broken)
    });
    let retrying = tower_herd::JitteredRetryLayer::new().layer(HashedFailover::new(rungs).unwrap());
    let error = retrying.oneshot(http::Request::put("/").body(String::new()).unwrap()).await.unwrap_err();
    assert_eq!((error.to_string(), calls.load(Ordering::Relaxed)), ("reset".into(), 1));
}

// A layer of a rung may say no for something that the ladder does not know: that is waited for, not asked
// over and over.
#[tokio::test(start_paused = true)]
async fn a_refusal_about_something_else_does_not_spin() {
    for foreign in [false, true] {
        let fleet = Fleet::local();
        let (one, two) = (fleet.provider("one"), fleet.provider("two"));
        let paused = if foreign { fleet.provider("account") } else { one.scope("model") };
        let script = Script::always(answer(200));
        let asked = Arc::new(AtomicUsize::new(0));
        let counting = {
            let asked = asked.clone();
            move |request: Request| {
                assert!(asked.fetch_add(1, Ordering::Relaxed) < 20, "it spins");
                request
            }
        };
        let service = RetryAfterLayer::new(&paused).patience(ms(0)).layer(script.clone());
        let service = tower::util::MapRequest::new(service, counting);
        paused.pause_for(secs(30));
        let rungs = [Rung::new(&one, service.clone()), Rung::new(&two, service)];
        let start = Instant::now();
        HashedFailover::new(rungs).unwrap().oneshot(request(1)).await.unwrap();
        assert!((secs(30)..secs(33)).contains(&start.elapsed()), "{foreign}: {:?}", start.elapsed());
    }
}

// Each fleet's clock has an origin of its own.
#[tokio::test(start_paused = true)]
async fn rungs_may_come_from_fleets_of_different_age() {
    let old = Fleet::local().provider("old");
    tokio::time::advance(secs(3600)).await;
    let new = Fleet::local().provider("new");
    for [first, second] in [[&old, &new], [&new, &old]] {
        first.pause_for(secs(20));
        second.pause_for(secs(10));
        let start = Instant::now();
        let script = Script::always(answer(200));
        let ladder = HashedFailover::new([first, second].map(|provider| rung(provider, &script))).unwrap();
        ladder.oneshot(request(1)).await.unwrap();
        assert!((secs(10)..secs(12)).contains(&start.elapsed()), "{:?}", start.elapsed());
        first.clear_pause();
        second.clear_pause();
        tokio::time::advance(secs(60)).await;
    }
}

// Law 3: a task that goes to and fro is one task at each.
#[tokio::test(start_paused = true)]
async fn a_task_is_counted_once_at_each_provider() {
    use tower_herd::{Budget as _, RatioBudget};
    let ladder = ladder(&[5, 5], &[answer(200), answer(200)]);
    let budget = RatioBudget::new(0.25).reserve(0, secs(1000)).window(secs(100_000));
    let service = ladder.service().budget(&budget);
    for i in 0..20 {
        let paused = &ladder.providers[i % 2];
        paused.pause_for(secs(20));
        service.clone().oneshot(request(1)).await.unwrap();
        paused.clear_pause();
    }
    // Each of 20 requests has a task of its own here.
    assert_eq!(ladder.calls(), [10, 10]);
    assert!(budget.of("rung-0").unwrap().try_withdraw() && budget.of("rung-0").unwrap().try_withdraw());
    let budget = RatioBudget::new(0.25).reserve(0, secs(1000)).window(secs(100_000));
    let service = ladder.service().budget(&budget);
    let task = Task::new(1);
    for i in 0..20 {
        let paused = &ladder.providers[i % 2];
        paused.pause_for(secs(20));
        let mut request = request(1);
        request.extensions_mut().insert(task.clone());
        service.clone().oneshot(request).await.unwrap();
        paused.clear_pause();
    }
    assert!(!budget.of("rung-0").unwrap().try_withdraw() && !budget.of("rung-1").unwrap().try_withdraw());
}

/// What a rung of [`walk_over`] does.
#[derive(Clone)]
enum Then {
    Reply(u16),
    Break,
    Refuse(RefusalKind),
}

/// What comes of a walk over such rungs, a tier each, and how often each was called.
async fn walk_over(rungs: &[Then]) -> (Result<common::Response, tower_herd::BoxError>, Task, Vec<usize>) {
    let fleet = Fleet::local().seed(1);
    let calls: Vec<_> = rungs.iter().map(|_| Arc::new(AtomicUsize::new(0))).collect();
    let rungs = rungs.iter().enumerate().map(|(i, then)| {
        let (provider, then, calls) = (fleet.provider(&format!("rung-{i}")), then.clone(), calls[i].clone());
        let name = provider.name().clone();
        let service = service_fn(move |_: Request| {
            calls.fetch_add(1, Ordering::SeqCst);
            let outcome = match then {
                Then::Reply(status) => {
                    Ok(http::Response::builder().status(status).body(String::new()).unwrap())
                }
                Then::Break => Err("the connection broke".into()),
                Then::Refuse(kind) => Err(Refusal::new(kind, "a test", name.clone(), None).into()),
            };
            std::future::ready::<Result<common::Response, tower_herd::BoxError>>(outcome)
        });
        Rung::new(&provider, service).tier(i as u32)
    });
    let ladder = HashedFailover::new(rungs).unwrap().classify(empty_on_204());
    let service = tower_herd::JitteredRetryLayer::new().classify(empty_on_204()).layer(ladder);
    let (mut request, task) = (request(1), Task::new(1).allowance(9));
    request.extensions_mut().insert(task.clone());
    let outcome = service.oneshot(request).await;
    (outcome, task, calls.iter().map(|calls| calls.load(Ordering::SeqCst)).collect())
}

// Law 10: the last real reply, stamped, and not the refusal that ended the walk.
#[tokio::test(start_paused = true)]
async fn a_final_no_further_down_gives_the_reply_before_it() {
    use tower_herd::Exhausted;
    for kind in [RefusalKind::Spend, RefusalKind::Draining, RefusalKind::Exhausted] {
        let (outcome, task, calls) =
            walk_over(&[Then::Reply(503), Then::Reply(500), Then::Refuse(kind), Then::Reply(200)]).await;
        let reply = outcome.unwrap();
        assert_eq!((reply.status().as_u16(), calls), (500, vec![1, 1, 1, 0]), "{kind:?}");
        assert_eq!(reply.extensions().get(), Some(&Exhausted::new(2, None)));
        assert!(task.is_exhausted());
    }
    // An error bears no mark, but its task does.
    let (outcome, task, calls) = walk_over(&[Then::Break, Then::Refuse(RefusalKind::Spend)]).await;
    assert_eq!(outcome.unwrap_err().to_string(), "the connection broke");
    assert!(task.is_exhausted() && calls == [1, 1]);
    // "Nothing found" is an answer, and no failure that was given up.
    let (outcome, task, _) = walk_over(&[Then::Reply(204), Then::Refuse(RefusalKind::Spend)]).await;
    let reply = outcome.unwrap();
    assert_eq!((reply.status().as_u16(), reply.extensions().get::<Exhausted>()), (204, None));
    assert!(!task.is_exhausted());
    // And without a reply the refusal it is.
    let (outcome, _, calls) = walk_over(&[Then::Refuse(RefusalKind::Spend), Then::Reply(200)]).await;
    assert_eq!(Refusal::find(&*outcome.unwrap_err()).unwrap().kind, RefusalKind::Spend);
    assert_eq!(calls, [1, 0]);
}
