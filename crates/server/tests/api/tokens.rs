//! `/tokenize` and `/detokenize`.

use crate::support::TestServer;
use serde_json::json;

#[test]
fn texts_go_there_and_back() {
    let server = TestServer::start();
    let answer = server.ok("/tokenize", &json!({"prompt": "The king said to the messenger that"}));
    assert_eq!(answer["tokens"], json!([360, 383, 290, 466, 283, 268, 269, 372, 278, 74, 274, 319]));
    assert_eq!((&answer["count"], &answer["max_model_len"]), (&json!(12), &json!(512)));
    let back = server.ok("/detokenize", &json!({"tokens": answer["tokens"]}));
    assert_eq!(back["prompt"], "The king said to the messenger that");
    let empty = server.ok("/tokenize", &json!({"prompt": ""}));
    assert_eq!(empty["tokens"], json!([]));
}

#[test]
fn d24_messages_are_rendered_as_the_reference_does() {
    let server = TestServer::start();
    let messages =
        json!([{"role": "system", "content": "You are a poet."}, {"role": "user", "content": "Speak of the sea."}]);
    let answer = server.ok("/tokenize", &json!({"messages": messages, "return_token_strs": true}));
    let expected = json!([
        1, 86, 92, 313, 448, 202, 60, 266, 460, 262, 295, 82, 324, 17, 2, 202, 1, 407, 274, 202, 54, 391, 456, 289,
        268, 375, 68, 17, 2, 202, 1, 300, 86, 501, 447, 202
    ]);
    assert_eq!(answer["tokens"], expected);
    assert_eq!(answer["token_strs"][0], "<|im_start|>");
    let text = server.ok("/detokenize", &json!({"tokens": expected}));
    assert!(text["prompt"].as_str().unwrap().starts_with("<|im_start|>system\nYou are a poet.<|im_end|>"));
    let plain = server.ok("/detokenize", &json!({"tokens": expected, "skip_special_tokens": true}));
    assert!(plain["prompt"].as_str().unwrap().starts_with("system\n"));
}

#[test]
fn an_open_message_is_continued() {
    let server = TestServer::start();
    let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "The king"}]);
    let ids = server.ok("/tokenize", &json!({"messages": messages, "continue_final_message": true}))["tokens"].clone();
    let text = server.ok("/detokenize", &json!({"tokens": ids}))["prompt"].as_str().unwrap().to_owned();
    assert!(text.ends_with("<|im_start|>assistant\nThe king"), "{text}");
}

#[test]
fn wrong_questions_are_refused() {
    let server = TestServer::start();
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}), "prompt"),
        (json!({"prompt": "a", "add_generation_prompt": true}), "add_generation_prompt"),
        (json!({"prompt": "a", "x": 1}), "x"),
    ] {
        let (status, named, _) = server.refused("/tokenize", &body);
        assert_eq!((status, named.as_str()), (400, param), "{body}");
    }
    for tokens in [json!([-1]), json!([512]), json!(["a"])] {
        let (status, named, _) = server.refused("/detokenize", &json!({"tokens": tokens}));
        assert_eq!(status, 400);
        assert!(named.starts_with("tokens"), "{named}");
    }
}
