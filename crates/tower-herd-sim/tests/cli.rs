//! The binary: what it prints, and what it says to bad options.

use std::process::{Command, Output};

fn sim(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tower-herd-sim")).args(args).output().unwrap()
}

fn out(o: &Output) -> String {
    String::from_utf8(o.stdout.clone()).unwrap()
}

#[test]
fn json_is_one_object_a_line_and_nothing_else() {
    let o = sim(&["stampede", "--json", "--set", "tasks=300", "--seeds", "2", "--policy", "naive,oracle"]);
    assert!(o.status.success());
    let text = out(&o);
    assert_eq!(text.lines().count(), 4);
    for line in text.lines() {
        let v: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(v["scenario"], "stampede");
        assert_eq!(v["tasks"], 300);
        assert_eq!(v.as_object().unwrap().len(), 19);
    }
}

#[test]
fn the_same_seed_prints_the_same() {
    let args = ["equal-hint", "--seed", "9", "--set", "agents=50"];
    assert_eq!(sim(&args).stdout, sim(&args).stdout);
}

#[test]
fn bad_options_are_told_on_stderr() {
    for (args, word) in [
        (&["nowhere"][..], "stampede, equal-hint, brownout, recovery, amplification, cron"),
        (&["stampede", "--policy", "magic"], "there are: naive"),
        (&["stampede", "--set", "colour=red"], "the keys are: agents"),
        (&["stampede", "--set", "agents"], "KEY=VALUE"),
        (&["stampede", "--set", "agents=none"], "whole number"),
        (&["stampede", "--set", "returns=1"], "after cut_at"),
        (&["stampede", "--seeds", "0"], "--seeds"),
        (&["stampede", "--set", "tasks=10", "--report", "/nowhere/at/all.html"], "/nowhere/at/all.html"),
        (&[], "SCENARIO"),
    ] {
        let o = sim(args);
        assert_eq!(o.status.code(), Some(2), "{args:?}");
        let said = String::from_utf8(o.stderr).unwrap();
        assert!(said.contains(word), "{args:?}: {said}");
    }
}

#[test]
fn the_report_is_written() {
    let path = std::env::temp_dir().join(format!("tower-herd-sim-{}.html", std::process::id()));
    let o = sim(&["stampede", "--set", "tasks=200", "--json", "--report", path.to_str().unwrap()]);
    assert!(o.status.success());
    assert!(out(&o).lines().all(|l| l.starts_with('{')));
    let page = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
}

/// Beside the calls of a thousand jobs, the retries of a few.
#[test]
fn cron_tells_of_retries_too() {
    let short = ["--set", "agents=20", "--set", "processes=2", "--set", "duration=61"];
    let o = sim(&[&["cron"][..], &short].concat());
    assert!(o.status.success());
    assert!(out(&o).contains("| token | 7 | 5 | 4 | 1 |"), "{}", out(&o));
    let o = sim(&[&["cron", "--json", "--seed", "3"][..], &short].concat());
    let lines: Vec<serde_json::Value> =
        out(&o).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let retries: Vec<_> = lines.iter().filter(|line| line["part"] == "retries").collect();
    assert_eq!(retries.len(), 12);
    assert_eq!((&retries[0]["fix"], &retries[0]["figures"]["retries_minute"]), (&"none".into(), &12.into()));
    // With a policy of one's choice, only what that is about.
    let o = sim(&[&["cron", "--json", "--policy", "naive"][..], &short].concat());
    assert_eq!(out(&o).lines().count(), 1);
}
