"""Hand-written questions, grouped by topic, for measuring each embedder's default minimum similarity.

Each topic has several wordings of one question. The first wording is the question of the stored case; each other
wording should find this case. Wordings of different topics are unrelated, even if they begin with the same words.
"""

from __future__ import annotations

TOPICS: tuple[tuple[str, ...], ...] = (
    # network and devices
    ("How do I reset the router?", "please, how do I reset the router", "What is the way to reset my router?"),
    ("How do I change the wifi password?", "change password of the wifi", "I want to change my wifi password, how?"),
    ("Why is my laptop battery draining so fast?", "laptop battery drains fast", "My laptop's battery is draining"),
    ("The printer is offline, what can I do?", "printer shows offline", "My printer says that it is offline"),
    ("How do I update the firmware of the camera?", "camera firmware update", "Updating the firmware of my camera"),
    # accounts and orders
    ("How can I cancel my subscription?", "cancel subscription", "I would like to cancel my subscription please"),
    ("Where is my order?", "where's my order now?", "Can you tell me where my order is?"),
    ("How do I return a damaged item?", "returning a damaged item", "The item arrived damaged, how do I return it?"),
    ("How do I download an invoice?", "download my invoice", "Where can I download the invoice for last month?"),
    ("How do I change my delivery address?", "change delivery address", "My delivery address has changed"),
    ("Which payment methods do you accept?", "accepted payment methods", "What methods of payment are accepted?"),
    ("How do I delete my account?", "delete account permanently", "I want my account to be deleted"),
    # software
    ("How do I restore a PostgreSQL backup?", "restore postgresql backup", "restoring a backup of PostgreSQL"),
    ("How do I undo the last git commit?", "undo last commit git", "git: how to undo the commit I just made"),
    ("How do I read a CSV file in Python?", "python read csv file", "Reading CSV files with Python"),
    ("Why does my Docker container exit at once?", "docker container exits immediately", "My docker container exits"),
    ("How do I rotate the API keys?", "rotating api keys", "We need to rotate our API keys"),
    ("How do I schedule a Celery task every night?", "celery task each night", "schedule nightly celery task"),
    ("What does error 502 from nginx mean?", "nginx error 502", "nginx gives me a 502 error"),
    ("How do I write a regular expression for emails?", "regular expression for emails", "regex that matches emails"),
    # at work
    ("How do I book a meeting room?", "booking a meeting room", "I need to book a room for a meeting"),
    ("How many days of holiday do I have left?", "remaining days of holiday", "How much holiday is left for me?"),
    ("How do I submit my travel expenses?", "submit travel expenses", "submitting expenses of a business travel"),
    ("Who approves a purchase above 5000 euros?", "approval of purchases above 5000", "who approves large purchases"),
    ("How do I write a letter of resignation?", "letter of resignation", "help me write my resignation letter"),
    # at home
    ("How do I bake sourdough bread?", "sourdough bread recipe", "baking a bread with sourdough"),
    ("How long do I boil an egg?", "boiling an egg, how long", "How many minutes does an egg boil?"),
    ("How do I remove red wine from a carpet?", "red wine on the carpet", "removing a stain of red wine from carpet"),
    ("What can I plant in the shade?", "plants for the shade", "Which plants grow in the shade?"),
    ("How often should I water an orchid?", "watering orchids how often", "How often do orchids need water?"),
    ("How do I fix a dripping tap?", "fix dripping tap", "The tap in the kitchen is dripping"),
    ("What is the colour of the flag of Norway?", "colours of the Norwegian flag", "flag of Norway colours"),
    # health and travel
    ("How do I get rid of a headache?", "headache, what helps?", "What helps against a headache?"),
    ("Do I need a visa for Japan?", "visa for japan needed?", "Is a visa required to travel to Japan?"),
    ("What is the weather like in Lisbon in May?", "weather in Lisbon in May", "Lisbon weather May"),
    ("How do I claim compensation for a delayed flight?", "delayed flight compensation", "compensation delayed flight"),
    ("How do I train for a marathon?", "marathon training plan", "training for my first marathon"),
    # other languages
    ("비밀번호를 어떻게 변경하나요?", "비밀번호 변경 방법", "비밀번호를 변경하고 싶어요"),
    ("환불은 어떻게 받나요?", "환불 받는 방법", "환불을 받고 싶습니다"),
    ("배송은 며칠이나 걸리나요?", "배송 며칠 걸려요?", "배송이 얼마나 걸리나요"),
    ("회의실은 어떻게 예약하나요?", "회의실 예약 방법", "회의실을 예약하고 싶어요"),
    ("Wie setze ich mein Passwort zurück?", "Passwort zurücksetzen", "Ich möchte mein Passwort zurücksetzen"),
    ("Wie kündige ich meinen Vertrag?", "Vertrag kündigen", "Ich will den Vertrag kündigen"),
    ("Wo finde ich meine Rechnung?", "Rechnung finden", "Meine Rechnung finde ich nicht"),
    ("Comment annuler ma commande ?", "annuler une commande", "Je voudrais annuler ma commande"),
)

ASIDES = (
    "hello",
    "hi, how are you today?",
    "thanks a lot!",
    "ok",
    "Could you please help me with something?",
    "What do you think about that?",
    "tell me a joke",
    "I am tired and it is raining, what should I do today?",
    "Remember that my sister's birthday is on the 3rd of March.",
    "What did I say about the project yesterday?",
    "고마워요",
    "오늘 뭐 하지?",
)
"""Messages that no case answers."""
