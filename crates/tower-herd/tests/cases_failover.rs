//! Public reports about fallbacks that never fired, fired at everything, or killed the next one: what our
//! ladder does there.

mod common;

use common::{Answer, Boxed, Request, Script, answer, ms, request, retrying, rung, secs, until};
use std::sync::{Arc, Mutex, atomic::Ordering};
use tokio::time::Instant;
use tower::{Layer, ServiceExt};
use tower_herd::{
    Exhausted, Fleet, HashedFailover, Kind, PauseReason, Provider, ProviderSettings, Refusal, RefusalKind,
    Signal, Task, classify_body,
    failover::Rung,
    observe::{Event, Observe},
};

struct Ladder {
    fleet: Fleet,
    providers: Vec<Provider>,
    scripts: Vec<Script>,
    rungs: Vec<Rung<Boxed, Request>>,
}

/// No rung yet.
fn ladder() -> Ladder {
    let fleet = Fleet::local().seed(1);
    Ladder { fleet, providers: vec![], scripts: vec![], rungs: vec![] }
}

impl Ladder {
    /// One more rung, in a tier of its own.
    fn then(self, script: Script) -> Self {
        let tier = self.rungs.len() as u32;
        self.in_tier(tier, 5, script)
    }
    fn reply(self, answer: Answer) -> Self {
        self.then(Script::always(answer))
    }
    fn in_tier(mut self, tier: u32, ceiling: u32, script: Script) -> Self {
        let settings = ProviderSettings::new().ceiling(ceiling).aborts(true);
        let provider = self.fleet.configure(&format!("rung-{}", self.rungs.len()), settings).unwrap();
        self.rungs.push(Rung::new(&provider, rung(&provider, script.clone())).tier(tier));
        self.providers.push(provider);
        self.scripts.push(script);
        self
    }
    /// The ladder alone.
    fn walk(&self) -> Boxed {
        Boxed::new(HashedFailover::new(self.rungs.clone()).unwrap())
    }
    /// With the retry layer around it.
    fn stack(&self) -> Boxed {
        retrying(self.walk())
    }
    fn calls(&self) -> Vec<usize> {
        self.scripts.iter().map(Script::calls).collect()
    }
}

/// First this, then successes.
fn first(first: Answer) -> Script {
    Script::new(move |nth, _| if nth == 0 { first.clone() } else { answer(200) })
}

fn hint(seconds: u64) -> Answer {
    answer(429).header("retry-after", seconds)
}

// BerriAI/litellm#38968: affinity left no rung but the one that had failed, and it was picked again.
#[tokio::test(start_paused = true)]
async fn litellm_38968_the_failed_rung_is_not_asked_again_for_want_of_another() {
    // The other one is full, paused, or failing too; in the same tier and in a later one.
    for tier in [0, 1] {
        for state in ["full", "paused", "failing"] {
            let other = if state == "failing" { 500 } else { 200 };
            let mut sides = vec![];
            for affinity in 0..8 {
                let ladder = ladder().in_tier(0, 5, Script::always(answer(502))).in_tier(
                    tier,
                    1,
                    Script::always(answer(other).after(secs(9))),
                );
                let busy =
                    tokio::spawn(rung(&ladder.providers[1], ladder.scripts[1].clone()).oneshot(request(99)));
                if state == "full" {
                    tokio::task::yield_now().await;
                } else {
                    busy.abort();
                }
                if state == "paused" {
                    ladder.providers[1].pause_for(secs(100));
                }
                let mut request = until(affinity, secs(50));
                let task = Task::new(affinity).affinity(affinity).allowance(9).deadline_in(secs(50));
                request.extensions_mut().insert(task);
                let reply = ladder.walk().oneshot(request).await.unwrap();
                assert!(matches!(reply.status().as_u16(), 200 | 500 | 502));
                assert!(ladder.calls()[0] <= 1, "{state}: {:?}", ladder.calls());
                sides.push(ladder.calls()[0]);
            }
            assert!(sides.contains(&1), "somebody asked the failing one: {state}");
        }
    }
}

// superagent-ai/superagent#1145, iOfficeAI/AionUi#2782: every short 429 jumped, and burnt the spare rung and its keys.
#[tokio::test(start_paused = true)]
async fn superagent_1145_aionui_2782_a_short_wait_is_waited_in_place() {
    for (reply, stays) in
        [(hint(1), true), (hint(2), true), (answer(429), true), (hint(3), false), (hint(60), false)]
    {
        let ladder = ladder().then(first(reply.clone())).reply(answer(200));
        let start = Instant::now();
        let done = ladder.stack().oneshot(request(1)).await.unwrap();
        assert_eq!(done.status(), 200);
        let expected = if stays { vec![2, 0] } else { vec![1, 1] };
        assert_eq!(ladder.calls(), expected, "{reply:?}");
        assert_eq!(start.elapsed() >= secs(1), stays, "{reply:?}");
    }
}

// KarpelesLab/teamclaude#84, #89, #90, #137, #271, #309: thirty agents jumped together, the next account died of it, and so
// on; then they only waited, while a sibling stood idle. And the first account must not be forgotten.
#[tokio::test(start_paused = true)]
async fn teamclaude_84_309_thirty_go_over_in_a_line_and_come_back() {
    let fleet = Fleet::local().seed(1);
    let began = Instant::now();
    let scripts = [
        Script::new(move |_, _| match secs(60).checked_sub(began.elapsed()) {
            Some(left) if !left.is_zero() => hint(left.as_secs() + 1).after(ms(5)),
            _ => answer(200).after(secs(1)),
        }),
        Script::always(answer(200).after(secs(1))),
    ];
    let providers = [fleet.provider("one"), fleet.provider("two")];
    let rungs =
        (0..2).map(|i| Rung::new(&providers[i], rung(&providers[i], scripts[i].clone())).tier(i as u32));
    let service = retrying(Boxed::new(HashedFailover::new(rungs).unwrap()));
    let calls: Vec<_> = (0..30).map(|i| tokio::spawn(service.clone().oneshot(until(i, secs(300))))).collect();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().status(), 200);
    }
    let took = began.elapsed();
    assert!(took < secs(30), "not by waiting for the first one: {took:?}");
    let times = scripts[1].times(began);
    // One by one up to the ceiling of what is not known yet, and one more for each that is served.
    assert!(times.iter().filter(|at| **at < times[0] + 1000).count() <= 10, "{times:?}");
    assert!(times[..10].windows(6).all(|six| six[5] - six[0] >= 100), "{times:?}");
    assert!(times.windows(11).all(|many| many[10] - many[0] >= 100), "{times:?}");
    assert_eq!(providers[1].throttled(), 0, "and it did not die of it");
    // After the pause the first one is first again.
    tokio::time::sleep(secs(62)).await;
    let before = [scripts[0].calls(), scripts[1].calls()];
    for i in 100..110 {
        assert_eq!(service.clone().oneshot(until(i, secs(300))).await.unwrap().status(), 200);
    }
    assert_eq!([scripts[0].calls() - before[0], scripts[1].calls() - before[1]], [10, 0]);
}

// maximhq/bifrost#3261, langwatch/langwatch#7027, alibaba/higress#3930: the fallback did not fire on a 429, or only
// one hop was possible. voidmind-io/voidllm#184, api7/aisix#46: it was taken for a success.
#[tokio::test(start_paused = true)]
async fn bifrost_3261_langwatch_7027_higress_3930_as_many_hops_as_there_are_rungs() {
    let start = Instant::now();
    let ladder = ladder().reply(hint(60)).reply(hint(60)).reply(answer(200));
    let reply = ladder.stack().oneshot(request(1)).await.unwrap();
    assert_eq!((reply.status().as_u16(), ladder.calls()), (200, vec![1, 1, 1]));
    assert_eq!(start.elapsed(), ms(0), "without a wait");
    // None of them was found dead: each is paused for as long as it said, and has all its slots but a cut.
    for provider in &ladder.providers[..2] {
        assert_eq!(provider.paused_until(), Some((start + secs(60), PauseReason::Hint)));
        assert!(provider.throttled() == 1 && provider.ceiling() >= 1);
    }
}

// agentgateway/agentgateway#1500, #1087: without a header nobody was benched; a 503 did not fail over.
#[tokio::test(start_paused = true)]
async fn agentgateway_1500_1087_bare_429s_bench_and_a_503_goes_on() {
    let ladder_ = ladder().reply(answer(503)).reply(answer(200));
    assert_eq!(ladder_.walk().oneshot(request(1)).await.unwrap().status(), 200);
    assert_eq!(ladder_.calls(), [1, 1]);
    // The bare penalty doubles until it is worth to go on.
    let ladder = ladder().reply(answer(429)).reply(answer(200));
    let start = Instant::now();
    let reply = ladder.stack().oneshot(request(1)).await.unwrap();
    assert_eq!(reply.status(), 200);
    let (asked, served) = (ladder.scripts[0].times(start), ladder.scripts[1].times(start));
    assert!(asked.len() <= 3 && served.len() == 1, "{asked:?} {served:?}");
    assert!(asked.windows(2).all(|two| two[1] - two[0] >= 1000), "{asked:?}");
    assert!(served[0] <= 8000, "{served:?}");
}

/// Notes what providers said.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(String, Kind)>>>);
impl Observe for Log {
    fn observe(&self, event: &Event<'_>) {
        if let Event::Signal { provider, kind, .. } = event {
            self.0.lock().unwrap().push(((*provider).to_owned(), *kind));
        }
    }
}

// BerriAI/litellm#32574: the second failure within one request was taken for a duplicate and not recorded.
#[tokio::test(start_paused = true)]
async fn litellm_32574_each_failure_of_a_request_is_recorded_where_it_happened() {
    let log = Log::default();
    let mut ladder = ladder();
    ladder.fleet = Fleet::local().observer(log.clone());
    let ladder = ladder.reply(hint(40)).reply(hint(50)).reply(answer(500)).reply(answer(200));
    let start = Instant::now();
    assert_eq!(ladder.stack().oneshot(request(1)).await.unwrap().status(), 200);
    let seen = std::mem::take(&mut *log.0.lock().unwrap());
    let expected = [("rung-0", Kind::Throttled), ("rung-1", Kind::Throttled), ("rung-2", Kind::Failed)];
    assert_eq!(seen, expected.map(|(name, kind)| (name.to_owned(), kind)));
    let paused: Vec<_> = ladder.providers.iter().map(|p| p.paused_until().map(|(at, _)| at)).collect();
    assert_eq!(paused, [Some(start + secs(40)), Some(start + secs(50)), None, None]);
    // And at one provider, attempt by attempt.
    let one = self::ladder().then(Script::new(|nth, _| if nth < 3 { hint(1) } else { answer(200) }));
    one.stack().oneshot(request(2)).await.unwrap();
    assert_eq!(one.providers[0].throttled(), 3);
}

// BerriAI/litellm#3646, #27823, #4695, OrcaRouter-Lite#121: all cooled down, and an instant error
// that does not say when.
#[tokio::test(start_paused = true)]
async fn litellm_3646_27823_4695_all_closed_waits_for_the_first_or_says_when() {
    let ladder = ladder().then(first(hint(300))).then(first(hint(20))).then(first(hint(90)));
    let start = Instant::now();
    let reply = ladder.stack().oneshot(until(1, secs(200))).await.unwrap();
    assert_eq!((reply.status().as_u16(), ladder.calls()), (200, vec![1, 2, 1]));
    let again = ladder.scripts[1].times(start)[1];
    assert!(again >= 20_000, "{again}");
    // Too short a deadline: a real reply if there was one, stamped; else a refusal. At once.
    for provider in &ladder.providers {
        provider.clear_pause();
    }
    let closed = self::ladder().reply(hint(300)).reply(hint(70)).reply(hint(90));
    let now = Instant::now();
    let reply = closed.stack().oneshot(until(1, secs(30))).await.unwrap();
    assert_eq!((reply.status().as_u16(), now.elapsed()), (429, ms(0)));
    let exhausted = *reply.extensions().get::<Exhausted>().expect("stamped");
    assert!(exhausted.retry_at.is_some_and(|at| at >= now + secs(30)), "{exhausted:?}");
    let error = closed.stack().oneshot(until(2, secs(30))).await.unwrap_err();
    let refusal = Refusal::find(&*error).unwrap();
    assert_eq!((refusal.kind, refusal.retry_at), (RefusalKind::NoRung, Some(now + secs(70))), "the soonest");
    assert_eq!(refusal.to_response::<String>().headers()["retry-after"], "70");
    assert_eq!((now.elapsed(), closed.calls()), (ms(0), vec![1, 1, 1]));
}

// gajae-code#2444, openclaw/openclaw#90717: the only rung was benched for days though it was back in
// minutes. Some wait patiently, nobody comes anew; and some come and go.
#[tokio::test(start_paused = true)]
async fn gajae_2444_openclaw_90717_a_sole_rung_is_probed_by_who_waits_and_by_who_comes() {
    for scoped in [false, true] {
        for patient in [true, false] {
            let start = Instant::now();
            let script = Script::new(move |_, _| match start.elapsed() < secs(600) {
                true => hint(2 * 24 * 3600),
                false => answer(200),
            });
            let provider = Fleet::local().provider("p");
            let at = if scoped { provider.scope("model") } else { provider.clone() };
            let service =
                Boxed::new(HashedFailover::new([Rung::new(&at, rung(&at, script.clone()))]).unwrap());
            service.clone().oneshot(request(0)).await.unwrap();
            assert!(at.paused_until().is_some());
            if patient {
                // A day is the longest pause that is held; the probe comes after a twentieth of it.
                let waiting: Vec<_> =
                    (1..20).map(|i| tokio::spawn(service.clone().oneshot(until(i, secs(100_000))))).collect();
                for waiter in waiting {
                    assert_eq!(waiter.await.unwrap().unwrap().status(), 200);
                }
            } else {
                while service.clone().oneshot(until(1, secs(5))).await.is_err() {
                    tokio::time::sleep(secs(10)).await;
                    assert!(start.elapsed() < secs(10_000));
                }
            }
            let end = start.elapsed();
            assert!(end < secs(4500), "scoped {scoped}, patient {patient}: {end:?}");
            assert!(at.paused_until().is_none());
        }
    }
}

// Likewise for a gate alone: the limit's queue or the pause, no ladder and nobody who comes anew.
#[tokio::test(start_paused = true)]
async fn gajae_2444_who_waits_at_a_gate_probes_too() {
    for scoped in [false, true] {
        let script = first(hint(2 * 24 * 3600));
        let provider = Fleet::local().provider("p");
        let at = if scoped { provider.scope("model") } else { provider.clone() };
        let service = rung(&at, script.clone());
        let start = Instant::now();
        service.clone().oneshot(request(0)).await.unwrap();
        let waiting: Vec<_> =
            (1..20).map(|i| tokio::spawn(service.clone().oneshot(until(i, secs(100_000))))).collect();
        for waiter in waiting {
            assert_eq!(waiter.await.unwrap().unwrap().status(), 200);
        }
        let times = script.times(start);
        assert!(times[1] >= 4_320_000 && start.elapsed() < secs(4400), "scoped {scoped}: {times:?}");
    }
}

// maximhq/bifrost#6971, tinyhumansai/openhuman#6504, vercel/ai#5018: the hint did not reach the loop.
#[tokio::test(start_paused = true)]
async fn bifrost_6971_after_the_wait_or_elsewhere() {
    for rungs in [1, 2] {
        let mut ladder = ladder().then(first(hint(60)));
        if rungs == 2 {
            ladder = ladder.reply(answer(200));
        }
        let start = Instant::now();
        assert_eq!(ladder.stack().oneshot(until(1, secs(300))).await.unwrap().status(), 200);
        assert!(ladder.scripts[0].times(start)[1..].iter().all(|at| *at >= 60_000));
        assert_eq!(start.elapsed() < secs(1), rungs == 2);
    }
}

// KarpelesLab/teamclaude#309 (its #296, #307): a cap of one model, or a 429 without any hint for one model,
// benched the whole account.
#[tokio::test(start_paused = true)]
async fn teamclaude_309_the_other_models_of_an_account_go_on() {
    let account = Fleet::local().provider("account");
    let models = ["large", "small"].map(|name| account.scope(name));
    for limited in [hint(60), answer(429)] {
        let scripts = [Script::always(limited.clone()), Script::always(answer(200))];
        let rungs =
            (0..2).map(|i| Rung::new(&models[i], rung(&models[i], scripts[i].clone())).tier(i as u32));
        let service = retrying(Boxed::new(HashedFailover::new(rungs).unwrap()));
        let start = Instant::now();
        assert_eq!(service.oneshot(request(1)).await.unwrap().status(), 200);
        assert!(start.elapsed() < secs(10), "{limited:?}: {:?}", start.elapsed());
        assert!(models[0].paused_until().is_some() && models[1].paused_until().is_none());
        assert!(account.paused_until().is_none(), "{limited:?}");
        models[0].clear_pause();
    }
}

// mnfst/llm-gateway#2709, letta-ai/letta-code#1130: a 200 with nothing in it ended the walk as a success.
#[tokio::test(start_paused = true)]
async fn llm_gateway_2709_letta_code_1130_a_hollow_answer_goes_on_if_the_caller_calls_it_one() {
    type Judge = fn(&[u8]) -> Option<Signal>;
    let nobody: Judge = |_| None;
    let failed: Judge = |body| (body == b"[]").then(|| Signal::new(Kind::Failed));
    let empty: Judge = |body| (body == b"[]").then(|| Signal::new(Kind::Empty));
    for (judge, expected, spent) in [(nobody, vec![1, 0], 0), (failed, vec![1, 1], 1), (empty, vec![1, 1], 0)]
    {
        let fleet = Fleet::local();
        let scripts = [answer(200).body("[]"), answer(200).body("[1]")].map(Script::always);
        let rungs = scripts.iter().enumerate().map(|(i, script)| {
            let provider = fleet.provider(&i.to_string());
            let sensor = tower_herd::ClassifyLayer::new(&provider)
                .classify(classify_body(move |_: tower_herd::Head<'_>, body: &[u8]| judge(body)))
                .read_success(1000);
            Rung::new(&provider, sensor.layer(script.clone())).tier(i as u32)
        });
        let task = Task::new(1);
        let mut request = request(1);
        request.extensions_mut().insert(task.clone());
        HashedFailover::new(rungs).unwrap().oneshot(request).await.unwrap();
        assert_eq!(scripts.iter().map(Script::calls).collect::<Vec<_>>(), expected);
        assert_eq!(task.spent(), spent);
    }
}

// BerriAI/litellm#16092: a drained account answers 400, and kept on receiving traffic.
#[tokio::test(start_paused = true)]
async fn litellm_16092_a_drained_account_is_asked_once() {
    let drained = r#"{"type":"error","error":{"type":"invalid_request_error","message":"Your credit balance is too low to access the Anthropic API."}}"#;
    let fleet = Fleet::local();
    let scripts = [answer(400).body(drained), answer(200)].map(Script::always);
    let providers = [fleet.provider("drained"), fleet.provider("other")];
    let rungs: Vec<_> = (0..2)
        .map(|i| {
            let layers = tower::ServiceBuilder::new()
                .layer(tower_herd::RetryAfterLayer::new(&providers[i]))
                .layer(tower_herd::FleetLimitLayer::new(&providers[i]).until_reply())
                // Reads the error's body.
                .layer(tower_herd::ClassifyLayer::new(&providers[i]))
                .service(scripts[i].clone());
            Rung::new(&providers[i], layers).tier(i as u32)
        })
        .collect();
    let service = HashedFailover::new(rungs).unwrap();
    for i in 0..20 {
        assert_eq!(service.clone().oneshot(request(i)).await.unwrap().status(), 200);
    }
    assert_eq!((scripts[0].calls(), scripts[1].calls()), (1, 20));
    assert_eq!(providers[0].paused_until().map(|(_, reason)| reason), Some(PauseReason::Depleted));
}

// samosa-ai-com/opencode-go-multi-auth#6, BerriAI/litellm#5225: one request at fault was tried with
// every key, and took them all down.
#[tokio::test(start_paused = true)]
async fn opencode_go_multi_auth_6_a_poison_request_is_sent_once_and_marks_no_rung() {
    let ladder = ladder().then(first(answer(400))).then(first(answer(400))).then(first(answer(400)));
    assert_eq!(ladder.stack().oneshot(request(1)).await.unwrap().status(), 400);
    assert_eq!(ladder.calls(), [1, 0, 0]);
    assert_eq!(ladder.stack().oneshot(request(2)).await.unwrap().status(), 200);
    assert_eq!(ladder.calls(), [2, 0, 0]);
    assert!(ladder.providers.iter().all(|p| p.paused_until().is_none() && p.ceiling() == 5));
    assert_eq!(ladder.scripts[0].in_flight.load(Ordering::SeqCst), 0);
}
