//! A page as a browser shows it: a headless Chromium, with a script of the test's own that reads what was drawn.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

/// What people may have asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    Dark,
    Light,
}

/// Longest time that the browser may take, in seconds: it starts slowly on a busy machine.
const LIMIT_S: &str = "90";

/// Shows the page and gives the value that `script` (an expression) comes to there. `None` where there is no browser, which
/// is said; where `LOCKSTEP_TEST_BROWSER=required` it fails.
#[expect(clippy::print_stderr, reason = "a skipped test says why")]
pub fn seen(page: &Path, scheme: Scheme, script: &str) -> Option<Value> {
    let Some(browser) = browser() else {
        let required = std::env::var("LOCKSTEP_TEST_BROWSER").is_ok_and(|wanted| wanted == "required");
        assert!(!required, "LOCKSTEP_TEST_BROWSER=required, and there is no chromium");
        eprintln!("skipped: no chromium to open {} with; apt-get install chromium", page.display());
        return None;
    };
    let text = fs::read_to_string(page).unwrap_or_else(|error| panic!("cannot read {}: {error}", page.display()));
    // The page forbids every script: this one is let in, and nothing else is.
    let policy = "default-src 'none'";
    assert_eq!(text.matches(policy).count(), 1, "the page has to forbid what it does not hold");
    let text = text.replace(policy, &format!("{policy}; script-src 'unsafe-inline'"));
    let reader = format!(
        "<script>const seen = JSON.stringify({script}); const out = document.createElement('pre'); out.id = 'seen'; \
         out.textContent = seen; document.body.append(out);</script></body>"
    );
    let copy = page.with_extension(format!("{scheme:?}.html"));
    fs::write(&copy, text.replace("</body>", &reader)).expect("the copy can be written");
    let profile = page.with_extension(format!("{scheme:?}.profile"));
    let preferred = if scheme == Scheme::Dark { 0 } else { 1 };
    let output = Command::new("timeout")
        .args(["--kill-after=5", LIMIT_S, browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"])
        .args(["--disable-crash-reporter", "--disable-breakpad", "--disable-dev-shm-usage", "--window-size=1200,2000"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("--blink-settings=preferredColorScheme={preferred}"))
        .args(["--dump-dom", &format!("file://{}", copy.display())])
        .env("HOME", page.parent().expect("a directory"))
        .stdin(Stdio::null())
        .output()
        .expect("timeout can be started");
    let dom = String::from_utf8_lossy(&output.stdout);
    let found = dom.rsplit_once("<pre id=\"seen\">").and_then(|(_, rest)| rest.split_once("</pre>"));
    let (json, _) = found.unwrap_or_else(|| {
        panic!("the page's script did not run ({}): {}", output.status, String::from_utf8_lossy(&output.stderr))
    });
    let json = json.replace("&lt;", "<").replace("&gt;", ">").replace("&nbsp;", "\u{a0}").replace("&amp;", "&");
    Some(serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {json}")))
}

fn browser() -> Option<&'static str> {
    let answers = |name: &&str| {
        let version = Command::new(name).arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output();
        version.is_ok_and(|version| version.status.success())
    };
    ["chromium", "chromium-browser", "google-chrome"].into_iter().find(answers)
}
