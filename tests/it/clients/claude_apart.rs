//! Claude Code, one session in two places: two containers at once, and another folder and another home.

use super::anthropic::conversation;
use super::container::{Container, Version, assert_goes_on, bash, both_versions, id};
use super::model::{prompt, say};
use crate::support::TempHome;
use crate::support::backend::{Ran, eventually};

both_versions!(of_two_containers_at_once_one_has_the_session_and_the_other_a_branch, another_folder_and_another_home);

fn of_two_containers_at_once_one_has_the_session_and_the_other_a_branch(one: &Container<'_>) {
    let (model, session) = (one.model, id());
    one.begin(&session, &prompt("first", &[vec![say("first turn done")]]));
    let end_of_first = model.last("first PLAN");
    one.throw_away();
    let two = one.beside();
    // Both have their client running, each with a turn of its own, before either may go on.
    let go = one.cwd.join("go");
    let turn = |who: &str| {
        let waits = bash(&format!("while ! test -e {}; do sleep 0.05; done; echo {who}-out", go.display()));
        prompt(who, &[vec![waits], vec![say(&format!("{who} is done"))]])
    };
    let mut runs = [one.start(&session, "--resume", &turn("alpha")), two.start(&session, "--resume", &turn("beta"))];
    for who in ["alpha", "beta"] {
        assert_goes_on(&end_of_first, &model.asked(&format!("{who} PLAN")), &["first turn done", who]);
    }
    std::fs::write(&go, "").unwrap();
    for run in &mut runs {
        assert_eq!(run.code(), Some(0), "each client ends as if it were alone");
    }
    let disks = [one, &two].map(|container| std::fs::read_to_string(container.transcript(&session)).unwrap());

    // A third home: one of the two, whole, and nothing of the other.
    let three = one.beside();
    three.sessiond(&["restore", &session]).ok();
    let main = std::fs::read_to_string(three.transcript(&session)).unwrap();
    let winner = usize::from(main == disks[1]);
    assert!(main == disks[winner], "the log is neither the one's nor the other's");
    let (won, lost) = if winner == 0 { ("alpha", "beta") } else { ("beta", "alpha") };
    assert!(main.contains(&format!("{won} is done")) && !main.contains(&format!("{lost} is done")));
    let branches = || three.sessiond(&["ls", "--json"]).ok().json()["sessions"][0]["branches"].clone();
    eventually("ls shows the branch", || branches().as_array().is_some_and(|branches| branches.len() == 1));
    let branch = branches()[0].as_str().unwrap().to_owned();
    three.sessiond(&["pull", &session, "--branch", &branch, "--to", "branch"]).ok();
    let pulled = Container::transcripts_below(&three.cwd.join("branch"), &session).remove(0);
    assert_eq!(std::fs::read_to_string(pulled).unwrap(), disks[1 - winner]);
    std::fs::remove_dir_all(three.cwd.join("branch")).unwrap();

    three.resume(&session, &prompt("fourth", &[vec![say("fourth turn done")]]));
    let asked = conversation(&model.asked("fourth PLAN")).join("\n");
    assert!(asked.contains(&format!("{won}-out")) && !asked.contains(&format!("{lost}-out")), "{asked}");
}

fn another_folder_and_another_home(one: &Container<'_>) {
    let (model, session) = (one.model, id());
    one.begin(&session, &prompt("first", &[vec![bash("seq -f 'line %g' 9000")], vec![say("first turn done")]]));
    let end_of_first = model.last("first PLAN");
    let before = std::fs::read(one.transcript(&session)).unwrap();
    let folder = TempHome::new();
    let mut two = one.beside();
    two.cwd = folder.path().join("elsewhere, with a long name.d");
    std::fs::create_dir(&two.cwd).unwrap();
    if two.version == Version::Old {
        // This is what it is for: where it was, the client does not find it.
        two.sessiond(&["restore", &session]).ok();
        let ran = Ran(two.command(&session, &["--resume", &session, "-p", "hello"]).output().unwrap());
        assert!(ran.code() != 0 && format!("{}{}", ran.out(), ran.err()).contains("No conversation found"), "{}{}", ran.out(), ran.err());
    }
    let cwd = two.cwd.to_string_lossy().into_owned();
    two.sessiond(&["restore", &session, "--cwd", &cwd]).ok();
    assert_eq!(std::fs::read(two.transcript(&session)).unwrap(), before);
    two.resume(&session, &prompt("second", &[vec![say("second turn done")]]));
    assert_goes_on(&end_of_first, &model.asked("second PLAN"), &["first turn done", "second PLAN"]);
    let end_of_second = model.last("second PLAN");
    let after = std::fs::read(two.transcript(&session)).unwrap();
    assert!(after.starts_with(&before) && after.len() > before.len());

    // From here on it lives there: a plain restore puts it into that project, and only there.
    let mut three = two.beside();
    three.cwd = two.cwd.clone();
    three.resume(&session, &prompt("third", &[vec![say("third turn done")]]));
    assert!(std::fs::read(three.transcript(&session)).unwrap().starts_with(&after));
    assert_goes_on(&end_of_second, &model.asked("third PLAN"), &["second turn done", "third PLAN"]);
    let end_of_third = model.last("third PLAN");
    three.sessiond(&["verify", &session]).ok();

    // And back, in one step.
    let mut four = one.beside();
    four.cwd = one.cwd.clone();
    let back = four.cwd.to_string_lossy().into_owned();
    four.sessiond(&["restore", &session, "--cwd", &back]).ok();
    four.resume(&session, &prompt("fourth", &[vec![say("fourth turn done")]]));
    assert_goes_on(&end_of_third, &model.asked("fourth PLAN"), &["third turn done", "fourth PLAN"]);
    assert_eq!(four.transcript(&session).parent().unwrap().file_name(), one.transcript(&session).parent().unwrap().file_name());
}
