"""The rules repeat no statement that differs in a word that carries meaning, whatever the language."""

from __future__ import annotations

import pytest

from perdure.text.reading import read
from perdure.text.statements import Relation, differ, relate

DIFFERENT = (
    ("Ich fahre im Juni nach Rom.", "Ich fahre im Juli nach Rom."),
    ("Viajo a Roma en junio.", "Viajo a Roma en julio."),
    ("Bebo café por la mañana.", "Bebo zumo por la mañana."),
    ("J'aime le café.", "J'aime le thé."),
    ("会議は毎週です。", "会議は毎月です。"),
    ("会議は月曜日です。", "会議は火曜日です。"),
    ("母はうどんが好きです。", "母はそばが好きです。"),
    ("肉を食べると言いました。", "肉を食べないと言いました。"),
    ("我结婚了。", "我没结婚。"),
    ("会议在星期一。", "会议在星期二。"),
    ("我每天跑步。", "我每周跑步。"),
    ("회의는 매주 있어요.", "회의는 매달 있어요."),
    ("I have a good doctor.", "I have a bad doctor."),
    ("My sister lives in Lyon.", "My brother lives in Lyon."),
    ("I am allergic to nuts.", "I am allergic to cats."),
    ("", "I live in Lyon."),
    ("Tengo un hijo.", "Tengo una hija."),
    ("Ho un gatto.", "Ho una gatta."),
    ("姉がいます。", "妹がいます。"),
    ("I used to live in Rome.", "Should I move to Rome?"),
    ("My wife's manager is Tina.", "My project manager is Tina."),
)


@pytest.mark.parametrize(("earlier", "later"), DIFFERENT)
def test_what_differs_is_not_repeated(earlier: str, later: str) -> None:
    """A rule that took one for the other would reinforce what is not true."""
    assert relate(earlier, later) is not Relation.SAME
    assert relate(later, earlier) is not Relation.SAME


TURNED = (
    ("I owe Tom 50 euros.", "Tom owes me 50 euros."),
    ("I prefer tea to coffee.", "I prefer coffee to tea."),
    ("I take 1 pill in the morning and 2 at night.", "I take 2 pills in the morning and 1 at night."),
    ("The dog chases the cat.", "The cat chases the dog."),
    ("I have a dog.", "I had a dog."),
    ("My appointment is after lunch.", "My appointment is at lunch."),
    ("Ich mag Tee lieber als Kaffee.", "Ich mag Kaffee lieber als Tee."),
    ("Prefiero el té al café.", "Prefiero el café al té."),
    ("커피보다 차를 좋아해요.", "차보다 커피를 좋아해요."),
    ("我欠小王50元。", "小王欠我50元。"),
    ("コーヒーよりお茶が好きです。", "お茶よりコーヒーが好きです。"),
    ("أفضل الشاي على القهوة", "أفضل القهوة على الشاي"),
)


@pytest.mark.parametrize(("earlier", "later"), TURNED)
def test_the_same_words_in_another_order_are_not_repeated(earlier: str, later: str) -> None:
    """Who does what to whom is told by the order, and a model's "same" does not outweigh it."""
    for one, other in ((earlier, later), (later, earlier)):
        assert relate(one, other) is not Relation.SAME
        assert differ(one, other)


LYON, NUTS, MEAT, JAZZ = "I live in Lyon.", "I am allergic to peanuts.", "I eat meat.", "I love jazz."
OF_OTHERS = (
    (LYON, "My parents live in Nice."),
    (LYON, "The user's cousin lives in Nice."),
    (LYON, "My kids live in Berlin with their mother."),
    (LYON, "My personal trainer moved to Rome."),
    (LYON, "I think my boss moved to Rome."),
    (LYON, "I heard that Tom moved to Rome."),
    (LYON, "I have a cousin living in Rome."),
    (LYON, "She lives in Rome."),
    (LYON, "My sister's flat is in Rome."),
    (LYON, "The company that I work for is based in Paris."),
    (NUTS, "My grandmother is not allergic to peanuts."),
    (NUTS, "My trainer is no longer allergic to peanuts."),
    (MEAT, "My trainer doesn't eat meat."),
    (MEAT, "My brothers don't eat meat."),
    (MEAT, "Tom doesn't eat meat."),
    (JAZZ, "My trainer hates jazz."),
    (JAZZ, "Tom really hates jazz."),
    ("I have two cats.", "My trainer has three cats."),
    ("My name is Anna.", "My boat is called Bella."),
    ("My name is Anna.", "My middle name is Beth."),
    ("I am 34 years old.", "My shoe size is 43."),
    ("I am 34 years old.", "My grandmother is 90 years old."),
    ("My friend Anna lives in Lyon.", "My friend Ben lives in Paris."),
    ("My son Leo is 5 years old.", "My son Max is 8 years old."),
    ("My older sister lives in Lyon.", "My younger sister lives in Nice."),
    ("Ich wohne in Berlin.", "Meine Eltern wohnen in Köln."),
    ("Ich bin 34 Jahre alt.", "Meine Oma ist 90 Jahre alt."),
    ("Ich wohne in Berlin.", "Meine beste Freundin Anna wohnt in Rom."),
    ("Mein Freund Max wohnt in Köln.", "Mein Freund Tim wohnt in Bonn."),
    ("Vivo en Madrid.", "Mi tío vive en Sevilla."),
    ("Tengo 34 años.", "Mi coche tiene 12 años."),
    ("저는 35세예요.", "할머니는 90세예요."),
    ("제 이름은 지수예요.", "제 고양이 이름은 나비예요."),
    ("제 아들 이름은 지호예요.", "제 둘째 아들 이름은 민준이에요."),
    ("私は35歳です。", "祖母は90歳です。"),
    ("私の名前は田中です。", "うちの会社の名前は青空です。"),
    ("我住在北京。", "我叔叔住在上海。"),
    ("我住在北京。", "我的老师住在上海。"),
    ("我住在北京。", "叔叔住在上海。"),
    ("我姐姐住在上海。", "我二姐姐住在广州。"),
    ("My manager is Omar.", "My wife's manager is Tina."),
    ("My manager is Omar.", "My project manager is Tina."),
    ("I am 34 years old.", "My daughter Mia is 9."),
    ("I am allergic to eggs.", "My mum's egg allergy has gone away."),
    ("Tengo una hermana que se llama Ana.", "Tengo una hermana que se llama Berta."),
    ("J'ai une sœur qui s'appelle Anne.", "J'ai une sœur qui s'appelle Berthe."),
    ("J'habite à Lyon.", "Il habite à Nantes."),
    ("J'adore les sushis.", "Mes enfants détestent les sushis."),
    ("大阪に住んでいます。", "彼は東京に住んでいます。"),
    ("大阪に住んでいます。", "祖父母は東京に住んでいます。"),
    ("寿司が好きです。", "子供たちは寿司が嫌いです。"),
    ("娘の花は4歳です。", "娘の桜は8歳です。"),
    ("我住在北京。", "他住在上海。"),
    ("我喜欢寿司。", "我的孩子讨厌寿司。"),
    ("我女儿小花4岁。", "我女儿小草8岁。"),
)
OF_OTHER_THINGS = (
    ("I'm flying to Osaka in October.", "I'm not flying to Kyoto in October."),
    ("我会说英语。", "我不会说法语。"),
    ("My phone number is 030 1234567.", "My work phone number is 030 999999."),
    ("The budget for the kitchen is 8,000 euros.", "My budget is 2,000 euros."),
    ("I lent Sara 40 euros.", "I lent Ben 60 euros."),
    ("Mon loyer est de 700 euros.", "Mon salaire est de 2100 euros."),
    ("My cat allergy is gone.", "I have two cats."),
    ("L'utilisateur n'est plus allergique au lait.", "Je bois du lait."),
    ("We have two daughters.", "My daughter Mia is 9."),
    ("I eat meat.", "I don't eat meat on Fridays."),
    ("I weigh 91 kilos.", "I want to weigh 80 kilos."),
    ("Trabajo en Telefónica.", "Trabajo en Madrid."),
    ("我在百度工作。", "我在北京工作。"),
    ("Ich bin 35 Jahre alt.", "Der Termin ist am 3. Mai um 10 Uhr."),
    ("I am 34 years old.", "I'm 1.80 m tall."),
)
NOT_NOW = (
    (LYON, "The user lived in Paris as a child."),
    (LYON, "I used to live in Paris."),
    (LYON, "The user is thinking about moving to Paris."),
    (LYON, "I would love to live in Paris one day."),
    (LYON, "Should I move to Paris?"),
    (LYON, "I have never lived in Paris."),
    (LYON, 'My colleague said: "I moved to Paris."'),
    (LYON, "Imagine I live in Paris."),
    ("My manager is Omar.", "My former manager is Tina."),
    ("大阪に住んでいます。", "同僚は「東京に住んでいます」と言っていた。"),
    ("我住在北京。", "同事说“我住在上海”。"),
    ("J'habite à Lyon.", "J'ai habité à Paris jusqu'à l'année dernière."),
    ("J'habite à Lyon.", "Si j'ai le poste, je déménage à Paris."),
    (LYON, "I don't live in Paris any more."),
    (LYON, "The user lives in a small house with a garden."),
    (LYON, "My diet is based on vegetables."),
    (LYON, "I moved to the night shift."),
    ("I work at Fabrikam.", "I joined a choir."),
    ("I work at Fabrikam.", "I no longer work at Contoso."),
    ("I work at Fabrikam.", "I worked for IBM until 2015."),
    ("I work at Fabrikam.", "Dark mode works for me."),
    ("My name is Anna.", "I called the dentist."),
    ("My name is Anna.", "My name is not Beth."),
    (MEAT, "I didn't eat meat as a child."),
    (JAZZ, "I hated jazz as a child."),
    ("I lived in Paris as a child.", LYON),
    ("Ich wohne in Berlin.", "Ich wohne nicht in Hamburg."),
    ("Ich wohne in Berlin.", "Ich würde gern in Rom wohnen."),
    ("Ich arbeite bei Siemens.", "Ich arbeitete früher bei Bosch."),
    ("Vivo en Madrid.", "De niño viví en Roma."),
    ("Trabajo en Telefónica.", "Trabajo en casa los lunes."),
    ("저는 서울에 살아요.", "저는 어릴 때 부산에 살았어요."),
    ("大阪に住んでいます。", "子供の頃は東京に住んでいました。"),
    ("我住在北京。", "我打算明年搬到上海。"),
    ("我在华为工作。", "我以前在腾讯工作。"),
)


@pytest.mark.parametrize(("earlier", "later"), [*OF_OTHERS, *OF_OTHER_THINGS, *NOT_NOW])
def test_only_what_the_user_asserts_of_themselves_now_changes_their_facts(earlier: str, later: str) -> None:
    """Other people, and what was, may be, or is denied of another value, touch no fact."""
    assert relate(earlier, later) in (Relation.UNRELATED, Relation.UNKNOWN)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (LYON, "No, I live in Paris."),
        (LYON, "My husband and I moved to Nice."),
        (LYON, "I have lived in Paris since March."),
        (LYON, "I don't live in Lyon any more."),
        ("Lives in Lyon.", "Lives in Paris."),
        ("i live in lyon", "i moved to paris"),
        ("My grandmother lives in Nice.", "My grandmother moved to Lyon."),
        ("My son Leo is 5 years old.", "My son Leo is 6 years old."),
        ("The user's name is Anna.", "The user is called Beth."),
        ("I work at Fabrikam.", "In May I joined Globex."),
        (MEAT, "I don't eat meat any more."),
        (NUTS, "I'm not allergic to peanuts."),
        ("Ich bin 34 Jahre alt.", "Inzwischen bin ich 35 Jahre alt."),
        ("Vivo en Madrid.", "Ahora vivimos en Sevilla."),
        ("저는 서울에 살아요.", "지금은 부산에 살아요."),
        ("大阪に住んでいます。", "今は東京に住んでいます。"),
        ("我住在北京。", "我现在住在上海。"),
        ("J'habite à Lyon.", "J'ai déménagé à Nantes."),
        ("Je travaille pour Orange.", "Je ne travaille plus pour Orange, je travaille pour Airbus."),
        ("J'adore le jazz.", "Je n'aime plus le jazz."),
        ("J'ai deux enfants.", "J'ai trois enfants."),
        ("I work at Initech.", "I quit Initech and started at Hooli."),
        ("I have a job interview on Thursday.", "The job interview on Thursday was cancelled."),
        ("I prefer tea to coffee.", "I prefer coffee to tea now."),
        ("Vivimos en Rosario.", "Nos hemos mudado a Mendoza."),
        (LYON, "Since March I've lived in Paris."),
    ],
)
def test_what_the_user_asserts_changes_their_facts(earlier: str, later: str) -> None:
    """The rules stay useful: plain changes are found in seven languages."""
    assert relate(earlier, later) is Relation.CHANGES


@pytest.mark.parametrize(
    ("text", "subject", "attribute", "value"),
    [
        ("I live in Lyon.", "user", "home", {"lyon"}),
        ("My sister lives in Lyon.", "sister", "home", {"lyon"}),
        ("Nora works at Contoso.", "nora", "employer", {"contoso"}),
        ("Ich bin nach Hamburg gezogen.", "user", "home", {"hamburg"}),
        ("Mi perro se llama Toby.", "dog", "name", {"toby"}),
        ("제 여동생은 부산에 살아요.", "sister", "home", {"부산"}),
        ("東京に引っ越しました。", "user", "home", {"東京"}),
        ("我在华为工作。", "user", "employer", {"华为"}),
        ("I am 34 years old.", "user", "age", {"34"}),
        ("My boss is strict.", "user", None, set()),
        ("My boss lives in Lyon.", "boss", "home", {"lyon"}),
        ("My friend Anna lives in Lyon.", "friend anna", "home", {"lyon"}),
        ("She lives in Lyon.", "", "home", {"lyon"}),
        ("I joined a choir.", "user", None, set()),
    ],
)
def test_subjects_and_attributes_are_read(text: str, subject: str, attribute: str | None, value: set[str]) -> None:
    """A statement's subject, its attribute and the words of the value, in six languages."""
    found = read(text)
    assert (found.subject, found.attribute, {*found.value}) == (subject, attribute, value)
